// SPDX-License-Identifier: Apache-2.0
// Stop strings over text that arrives in any cuts.
#include "engine/text/stop_matcher.h"

#include <gtest/gtest.h>

#include <random>

namespace rubato::text {
namespace {

struct Outcome {
  std::string shown;
  bool matched = false;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

Outcome feed(const std::vector<std::string>& stops, const std::vector<std::string>& pieces) {
  StopMatcher matcher(stops);
  Outcome outcome;
  for (const std::string& piece : pieces) outcome.shown += matcher.push(piece);
  if (!matcher.matched()) outcome.shown += matcher.finish();
  outcome.matched = matcher.matched();
  return outcome;
}

std::ostream& operator<<(std::ostream& out, const Outcome& outcome) {
  return out << outcome.shown << (outcome.matched ? " [stop]" : "");
}

TEST(StopMatcher, text_before_a_match_over_several_pieces_is_shown_and_nothing_else) {
  EXPECT_EQ(feed({"DEFGHIJ"}, {"AB", "CDE", "FG", "HIJ", "K"}), (Outcome{"ABC", true}));
}

TEST(StopMatcher, of_two_stops_with_one_beginning_the_shorter_ends_first) {
  EXPECT_EQ(feed({"FGX", "FG"}, {"ABCDE", "F", "G", "H"}), (Outcome{"ABCDE", true}));
  EXPECT_EQ(feed({"FGX", "FG"}, {"ABCDEFGX"}), (Outcome{"ABCDE", true}));
  EXPECT_EQ(feed({"FGX", "FH"}, {"AF", "G", "FH"}), (Outcome{"AFG", true}));
}

TEST(StopMatcher, of_two_stops_that_end_together_no_part_of_the_longer_is_shown) {
  EXPECT_EQ(feed({"c", "abc"}, {"xa", "b", "c"}), (Outcome{"x", true}));
}

TEST(StopMatcher, held_text_is_released_when_the_match_fails) {
  StopMatcher matcher({"DEFG"});
  EXPECT_EQ(matcher.push("ABCDE"), "ABC");
  EXPECT_EQ(matcher.push("X"), "DEX");
  EXPECT_FALSE(matcher.matched());
}

TEST(StopMatcher, held_text_is_released_when_generation_ends) {
  StopMatcher matcher({"DEFG"});
  EXPECT_EQ(matcher.push("ABCDEF"), "ABC");
  EXPECT_EQ(matcher.finish(), "DEF");
  EXPECT_EQ(matcher.finish(), "");
}

TEST(StopMatcher, overlapping_beginnings_are_not_missed) {
  EXPECT_EQ(feed({"aab"}, {"a", "a", "a", "b"}), (Outcome{"a", true}));
  EXPECT_EQ(feed({"abab!"}, {"ababab!"}), (Outcome{"ab", true}));
}

TEST(StopMatcher, nothing_is_returned_after_a_match) {
  StopMatcher matcher({"b"});
  EXPECT_EQ(matcher.push("abc"), "a");
  EXPECT_EQ(matcher.push("more"), "");
  EXPECT_EQ(matcher.finish(), "");
}

TEST(StopMatcher, emoji_stop_is_not_confused_by_characters_that_share_bytes) {
  EXPECT_EQ(feed({"😀"}, {"a", "😁", "😀"}), (Outcome{"a😁", true}));
  StopMatcher matcher({"é!"});
  EXPECT_EQ(matcher.push("è"), "è") << "a shared first byte must not hold back a whole other character";
  EXPECT_EQ(matcher.push("é"), "");
  EXPECT_EQ(matcher.push("?"), "é?");
}

TEST(StopMatcher, without_stops_everything_passes_at_once) {
  StopMatcher matcher({});
  EXPECT_EQ(matcher.push("text"), "text");
  EXPECT_EQ(matcher.finish(), "");
}

/// The rule, written the slow way: the earliest end over all occurrences, and of those the earliest beginning.
Outcome search_whole(const std::vector<std::string>& stops, const std::string& text) {
  std::size_t end = std::string::npos;
  std::size_t begin = 0;
  for (const std::string& stop : stops) {
    const std::size_t at = text.find(stop);
    if (at == std::string::npos) continue;
    if (at + stop.size() < end || (at + stop.size() == end && at < begin)) {
      begin = at;
      end = at + stop.size();
    }
  }
  return end == std::string::npos ? Outcome{text, false} : Outcome{text.substr(0, begin), true};
}

TEST(StopMatcher, any_cut_of_the_text_gives_what_a_search_of_the_whole_gives) {
  constexpr std::uint64_t seed = 99;
  std::mt19937_64 random(seed);
  const auto word = [&](int length_max) {
    std::string text;
    const int length = std::uniform_int_distribution<int>(1, length_max)(random);
    for (int index = 0; index < length; ++index) text += "ab"[random() % 2];
    return text;
  };
  for (int round = 0; round < 20'000; ++round) {
    std::vector<std::string> stops;
    for (std::uint64_t count = random() % 4; count > 0; --count) stops.push_back(std::string(1, 'c').append(word(4)));
    stops.push_back(word(7));
    std::string text;
    std::vector<std::string> pieces;
    for (std::uint64_t count = random() % 8; count > 0; --count) {
      pieces.push_back(random() % 5 == 0 ? "c" : word(4));
      text += pieces.back();
    }
    ASSERT_EQ(feed(stops, pieces), search_whole(stops, text)) << "seed " << seed << " round " << round;
  }
}

}  // namespace
}  // namespace rubato::text
