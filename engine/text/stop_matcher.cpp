// SPDX-License-Identifier: Apache-2.0
// One Knuth-Morris-Pratt automaton per stop string, fed byte by byte: the outcome cannot depend on how the text was cut into
// pieces.
#include "engine/text/stop_matcher.h"

#include <algorithm>

#include "manifests/check.h"

namespace rubato::text {

StopMatcher::StopMatcher(std::vector<std::string> stops) {
  for (std::string& stop : stops) {
    CHECK(!stop.empty());
    Automaton automaton{.stop = std::move(stop), .failure = {}, .matched = 0};
    automaton.failure.assign(automaton.stop.size(), 0);
    for (std::size_t index = 1, border = 0; index < automaton.stop.size(); ++index) {
      while (border > 0 && automaton.stop[index] != automaton.stop[border]) border = automaton.failure[border - 1];
      if (automaton.stop[index] == automaton.stop[border]) ++border;
      automaton.failure[index] = border;
    }
    automata_.push_back(std::move(automaton));
  }
}

void StopMatcher::Automaton::feed(char byte) {
  while (matched > 0 && stop[matched] != byte) matched = failure[matched - 1];
  if (stop[matched] == byte) ++matched;
}

std::string StopMatcher::push(std::string_view text) {
  if (matched_) return {};
  for (std::size_t index = 0; index < text.size(); ++index) {
    std::size_t longest = 0;  // of the stop strings that end here
    for (Automaton& automaton : automata_) {
      automaton.feed(text[index]);
      if (automaton.matched == automaton.stop.size()) longest = std::max(longest, automaton.stop.size());
    }
    if (longest > 0) {
      matched_ = true;
      std::string shown = std::move(held_);
      shown += text.substr(0, index + 1);
      shown.resize(shown.size() - longest);
      held_.clear();
      return shown;
    }
  }
  std::size_t undecided = 0;
  for (const Automaton& automaton : automata_) undecided = std::max(undecided, automaton.matched);
  std::string shown = std::move(held_);
  shown += text;
  held_ = shown.substr(shown.size() - undecided);
  shown.resize(shown.size() - undecided);
  return shown;
}

std::string StopMatcher::finish() {
  std::string shown = std::move(held_);
  held_.clear();
  return shown;
}

}  // namespace rubato::text
