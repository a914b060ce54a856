// SPDX-License-Identifier: Apache-2.0
// The list of ways that a check goes through, and what is said of them.
#include "engine/exactness.h"

#include <utility>

namespace rubato::engine {
namespace {

constexpr std::int32_t prompts = 2;

}  // namespace

std::string ExactnessCase::name() const {
  std::string text =
      chunks == Chunks::Random ? "random chunks up to " + std::to_string(chunk) : "chunks of " + std::to_string(chunk);
  text += company > 0 ? ", among " + std::to_string(company) + " others" : ", alone";
  switch (route) {
    case Route::OneLane:
      break;
    case Route::TwoLanes:
      text += ", prefilled by the second lane at " + std::to_string(share_percent) + " %";
      break;
    case Route::OtherPlace:
      text += ", copied within the pool";
      break;
    case Route::OtherPool:
      text += ", copied to another device";
      break;
  }
  if (reuse != Reuse::Nothing) text += reuse == Reuse::WholePrompt ? ", the whole prompt reused" : ", half of the prompt reused";
  if (preemptions > 0) text += ", preempted " + std::to_string(preemptions) + " times";
  return text + (steps == Steps::Shapes ? ", in shapes" : ", eagerly");
}

std::string ExactnessDifference::text() const {
  return "token " + std::to_string(token) + ", " + layer;
}

std::vector<ExactnessCase> exactness_cases() {
  using Case = ExactnessCase;
  constexpr std::int32_t all = 1 << 20;
  constexpr std::int32_t others = 31;
  std::vector<Case> cases;
  // How the prompt is cut, in what company, and in what kind of step.
  for (const std::int32_t chunk : {all, 1, 7, 64, 100, 256}) {
    for (const std::int32_t company : {0, others}) {
      for (const Case::Steps steps : {Case::Steps::Eager, Case::Steps::Shapes})
        cases.push_back({.chunk = chunk, .company = company, .steps = steps});
    }
  }
  for (const Case::Steps steps : {Case::Steps::Eager, Case::Steps::Shapes}) {
    cases.push_back({.chunk = 90, .chunks = Case::Chunks::Random, .company = others, .steps = steps});
    // Where it is computed.
    for (const std::int32_t share : {10, 50, 90}) {
      cases.push_back({.chunk = 64, .company = others, .route = Case::Route::TwoLanes, .share_percent = share, .steps = steps});
    }
    for (const Case::Route route : {Case::Route::OtherPlace, Case::Route::OtherPool})
      cases.push_back({.chunk = 100, .company = others, .route = route, .steps = steps});
    // What is computed again, or not at all.
    cases.push_back({.chunk = 64, .company = others, .preemptions = 3, .steps = steps});
    for (const Case::Reuse reuse : {Case::Reuse::HalfThePrompt, Case::Reuse::WholePrompt}) {
      cases.push_back({.chunk = all, .reuse = reuse, .steps = steps});
      cases.push_back(
          {.chunk = 50, .chunks = Case::Chunks::Random, .company = others, .reuse = reuse, .preemptions = 1, .steps = steps});
      cases.push_back({.chunk = 100, .company = others, .route = Case::Route::TwoLanes, .reuse = reuse, .steps = steps});
    }
  }
  return cases;
}

std::string ExactnessReport::text() const {
  if (failure) return "FAIL: other bits at " + failure->difference.text() + " (" + failure->way.name() + ")";
  std::string text = "PASS: the same bits in " + std::to_string(cases) + " ways";
  if (skipped > 0)
    text += "; " + std::to_string(skipped) + " need what this engine has not (a second lane, another device, shapes)";
  return text;
}

Result<ExactnessReport> check_exactness(const ExactnessTarget& target, const std::function<void(const ExactnessCase&)>& progress,
                                        const std::stop_token& stop) {
  ExactnessReport report;
  for (std::int32_t prompt = 0; prompt < prompts; ++prompt) {
    ExactnessTarget drawn = target;
    drawn.seed = target.seed + static_cast<std::uint64_t>(prompt);
    drawn.prompt_tokens -= 37 * prompt;  // another remainder by every block and tile
    Result<ExactnessChecker> checker = ExactnessChecker::make(drawn);
    if (!checker) return Unexpected(std::move(checker).error());
    Result<ExactnessReference> reference = checker->reference();
    if (!reference) return Unexpected(std::move(reference).error());
    for (const ExactnessCase& way : exactness_cases()) {
      if (stop.stop_requested()) return unexpected(ErrorCode::Cancelled, "the exactness check was stopped");
      if (!checker->applies(way)) {
        ++report.skipped;
        continue;
      }
      if (progress) progress(way);
      Result<std::optional<ExactnessDifference>> difference = checker->run(way, *reference);
      if (!difference) return Unexpected(std::move(difference).error());
      ++report.cases;
      if (!*difference) continue;
      report.failure = {.way = way, .difference = **difference};
      return report;
    }
  }
  return report;
}

}  // namespace rubato::engine
