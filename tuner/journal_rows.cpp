// SPDX-License-Identifier: Apache-2.0
#include "tuner/journal_rows.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "tuner/evidence.h"

namespace rubato::tuner {

namespace {

using Json = nlohmann::ordered_json;

constexpr int policy_count = 4;
constexpr int mode_count = 2;
constexpr int reservation_count = 3;

Json to_json(const IntegerKnob& knob) {
  return {knob.initial, knob.min, knob.max};
}

template <class Choice>
Json to_json(const ChoiceKnob<Choice>& knob) {
  Json choices = Json::array();
  for (const Choice choice : knob.choices) choices.push_back(static_cast<int>(choice));
  return {{"initial", static_cast<int>(knob.initial)}, {"choices", choices}};
}

template <class Choice>
Choice choice_from(const Json& value, int count) {
  const int number = value.get<int>();
  if (number < 0 || number >= count) throw std::out_of_range("choice");
  return static_cast<Choice>(number);
}

IntegerKnob integer_from(const Json& value) {
  return {
      .initial = value.at(0).get<std::int32_t>(), .min = value.at(1).get<std::int32_t>(), .max = value.at(2).get<std::int32_t>()};
}

template <class Choice>
ChoiceKnob<Choice> choices_from(const Json& value, int count) {
  ChoiceKnob<Choice> knob{choice_from<Choice>(value.at("initial"), count), {}};
  for (const Json& one : value.at("choices")) knob.choices.push_back(choice_from<Choice>(one, count));
  return knob;
}

/// Runs a reader; whatever the library throws means that the row is not ours to use.
template <class Read>
auto guarded(const std::string& text, Read read) -> std::optional<decltype(read(Json{}))> {
  try {
    return read(Json::parse(text));
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

Duration nanoseconds(const Json& value) {
  return Duration(value.get<std::int64_t>());
}

}  // namespace

std::string to_row(const KnobValues& knobs) {
  return Json{{"maxNumBatchedTokens", knobs.max_num_batched_tokens},
              {"maxNumSeqs", knobs.max_num_seqs},
              {"priorityPolicy", static_cast<int>(knobs.priority_policy)},
              {"deadlineMargin", knobs.deadline_margin},
              {"mode", static_cast<int>(knobs.mode)},
              {"prefillShare", knobs.prefill_share},
              {"reservation", static_cast<int>(knobs.reservation)},
              {"prefillDevices", knobs.prefill_devices}}
      .dump();
}

std::string to_row(const KnobsSpec& bounds) {
  return Json{{"maxNumBatchedTokens", to_json(bounds.max_num_batched_tokens)},
              {"maxNumSeqs", to_json(bounds.max_num_seqs)},
              {"priorityPolicy", to_json(bounds.priority_policy)},
              {"deadlineMargin", to_json(bounds.deadline_margin)},
              {"mode", to_json(bounds.mode)},
              {"prefillShare", to_json(bounds.prefill_share)},
              {"reservation", to_json(bounds.reservation)},
              {"prefillDevices", to_json(bounds.prefill_devices)}}
      .dump();
}

std::string to_row(const Window& window) {
  return Json{{"begin", window.begin.time_since_epoch().count()},
              {"end", window.end.time_since_epoch().count()},
              {"settings", window.settings_number},
              {"arrivals", window.arrivals},
              {"judged", window.judged},
              {"good", window.good},
              {"rejected", window.rejected},
              {"ttftMisses", window.ttft_misses},
              {"itlMisses", window.itl_misses},
              {"ttftP50", window.ttft_p50.count()},
              {"ttftP99", window.ttft_p99.count()},
              {"itlP50", window.itl_p50.count()},
              {"itlP99", window.itl_p99.count()},
              {"promptTokens", window.prompt_tokens_mean},
              {"outputTokens", window.output_tokens_mean},
              {"intervalCv", window.arrival_interval_cv},
              {"oldestWait", window.oldest_wait.count()},
              {"waitingBegin", window.waiting_begin},
              {"waitingEnd", window.waiting_end}}
      .dump();
}

std::string to_row(const ExpectedOutcome& expected) {
  return Json{{"attainment", expected.attainment},    {"attainmentSpread", expected.attainment_spread},
              {"ttftP50", expected.ttft_p50.count()}, {"ttftP99", expected.ttft_p99.count()},
              {"itlP50", expected.itl_p50.count()},   {"itlP99", expected.itl_p99.count()}}
      .dump();
}

std::string to_row(const RegimeLoad& load) {
  return Json{{"rateLog2", load.features.rate},
              {"promptLog2", load.features.prompt},
              {"outputLog2", load.features.output},
              {"burstiness", load.burstiness}}
      .dump();
}

std::string to_row(const Evidence& evidence) {
  return Json{{"windows", evidence.windows},        {"judged", evidence.judged},        {"good", evidence.good},
              {"ttftMisses", evidence.ttft_misses}, {"itlMisses", evidence.itl_misses}, {"ttftExcess", evidence.ttft_excess},
              {"itlExcess", evidence.itl_excess},   {"saturated", evidence.saturated},  {"draining", evidence.draining}}
      .dump();
}

// Rows of before there were reservation and prefillDevices lack them; what was then done is what their defaults do.
std::optional<KnobValues> knobs_from_row(const std::string& text) {
  return guarded(text, [](const Json& json) {
    return KnobValues{.max_num_batched_tokens = json.at("maxNumBatchedTokens").get<std::int32_t>(),
                      .max_num_seqs = json.at("maxNumSeqs").get<std::int32_t>(),
                      .priority_policy = choice_from<PriorityPolicy>(json.at("priorityPolicy"), policy_count),
                      .deadline_margin = json.at("deadlineMargin").get<std::int32_t>(),
                      .mode = choice_from<Mode>(json.at("mode"), mode_count),
                      .prefill_share = json.at("prefillShare").get<std::int32_t>(),
                      .reservation = choice_from<Reservation>(json.value("reservation", Json(0)), reservation_count),
                      .prefill_devices = json.value("prefillDevices", 1)};
  });
}

std::optional<KnobsSpec> bounds_from_row(const std::string& text) {
  return guarded(text, [](const Json& json) {
    return KnobsSpec{.max_num_batched_tokens = integer_from(json.at("maxNumBatchedTokens")),
                     .priority_policy = choices_from<PriorityPolicy>(json.at("priorityPolicy"), policy_count),
                     .deadline_margin = integer_from(json.at("deadlineMargin")),
                     .max_num_seqs = integer_from(json.at("maxNumSeqs")),
                     .mode = choices_from<Mode>(json.at("mode"), mode_count),
                     .prefill_share = integer_from(json.at("prefillShare")),
                     .reservation = json.contains("reservation")
                                        ? choices_from<Reservation>(json.at("reservation"), reservation_count)
                                        : KnobsSpec{}.reservation,
                     .prefill_devices =
                         json.contains("prefillDevices") ? integer_from(json.at("prefillDevices")) : KnobsSpec{}.prefill_devices};
  });
}

std::optional<Window> window_from_row(const std::string& text) {
  auto window = guarded(text, [](const Json& json) {
    Window result;
    result.begin = TimePoint(nanoseconds(json.at("begin")));
    result.end = TimePoint(nanoseconds(json.at("end")));
    result.settings_number = json.at("settings").get<std::uint64_t>();
    result.arrivals = json.at("arrivals").get<std::int32_t>();
    result.judged = json.at("judged").get<std::int32_t>();
    result.good = json.at("good").get<std::int32_t>();
    result.rejected = json.at("rejected").get<std::int32_t>();
    result.ttft_misses = json.at("ttftMisses").get<std::int32_t>();
    result.itl_misses = json.at("itlMisses").get<std::int32_t>();
    result.ttft_p50 = nanoseconds(json.at("ttftP50"));
    result.ttft_p99 = nanoseconds(json.at("ttftP99"));
    result.itl_p50 = nanoseconds(json.at("itlP50"));
    result.itl_p99 = nanoseconds(json.at("itlP99"));
    result.prompt_tokens_mean = json.at("promptTokens").get<double>();
    result.output_tokens_mean = json.at("outputTokens").get<double>();
    result.arrival_interval_cv = json.at("intervalCv").get<double>();
    result.oldest_wait = nanoseconds(json.at("oldestWait"));
    result.waiting_begin = json.at("waitingBegin").get<std::int32_t>();
    result.waiting_end = json.at("waitingEnd").get<std::int32_t>();
    return result;
  });
  // A row that makes no sense as a window (a bit flip that is still JSON) must not teach anything.
  if (window && !contradiction(*window).empty()) return std::nullopt;
  return window;
}

std::optional<ExpectedOutcome> expected_from_row(const std::string& text) {
  auto expected = guarded(text, [](const Json& json) {
    return ExpectedOutcome{.attainment = json.at("attainment").get<double>(),
                           .attainment_spread = json.at("attainmentSpread").get<double>(),
                           .ttft_p50 = nanoseconds(json.at("ttftP50")),
                           .ttft_p99 = nanoseconds(json.at("ttftP99")),
                           .itl_p50 = nanoseconds(json.at("itlP50")),
                           .itl_p99 = nanoseconds(json.at("itlP99"))};
  });
  if (expected && !(expected->attainment >= 0 && expected->attainment <= 1 && expected->attainment_spread >= 0)) {
    return std::nullopt;
  }
  return expected;
}

std::optional<RegimeLoad> load_from_row(const std::string& text) {
  auto load = guarded(text, [](const Json& json) {
    return RegimeLoad{.features = {.rate = json.at("rateLog2").get<double>(),
                                   .prompt = json.at("promptLog2").get<double>(),
                                   .output = json.at("outputLog2").get<double>()},
                      .burstiness = json.at("burstiness").get<double>()};
  });
  constexpr double log2_max = 30;  // as the means of a window are bounded
  if (!load || !(load->burstiness >= 0 && load->burstiness <= 1e9)) return std::nullopt;
  for (const double feature : {load->features.rate, load->features.prompt, load->features.output}) {
    if (!(std::abs(feature) <= log2_max)) return std::nullopt;
  }
  return load;
}

std::optional<Evidence> evidence_from_row(const std::string& text) {
  auto evidence = guarded(text, [](const Json& json) {
    return Evidence{.windows = json.at("windows").get<std::int32_t>(),
                    .judged = json.at("judged").get<std::int32_t>(),
                    .good = json.at("good").get<std::int32_t>(),
                    .ttft_misses = json.at("ttftMisses").get<std::int32_t>(),
                    .itl_misses = json.at("itlMisses").get<std::int32_t>(),
                    .ttft_excess = json.at("ttftExcess").get<double>(),
                    .itl_excess = json.at("itlExcess").get<double>(),
                    .saturated = json.at("saturated").get<bool>(),
                    .draining = json.at("draining").get<bool>()};
  });
  if (!evidence) return std::nullopt;
  for (const std::int32_t count : {evidence->good, evidence->ttft_misses, evidence->itl_misses}) {
    if (count < 0 || count > evidence->judged) return std::nullopt;
  }
  if (evidence->windows < 0 || !(std::abs(evidence->ttft_excess) < 1e3 && std::abs(evidence->itl_excess) < 1e3)) {
    return std::nullopt;
  }
  return evidence;
}

}  // namespace rubato::tuner
