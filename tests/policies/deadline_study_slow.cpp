// SPDX-License-Identifier: Apache-2.0
// Policy Deadline against the best static settings on a simulated large machine: kinds of load by themselves, mixed and shifting;
// and an hour of overload, in which everybody is served. It ranks policies; it measures no machine.
#include <gtest/gtest.h>

#include <cstdio>

#include "tests/policies/served_load.h"

namespace rubato::policies {
namespace {

constexpr RequestKind chat{.prompt_median = 300, .prompt_spread = 0.9, .output_spread = 0.8, .ttft_target = 0.5};
constexpr RequestKind conversation{.prompt_spread = 0.9, .output_median = 140, .output_spread = 0.8};
constexpr RequestKind retrieval{
    .prompt_median = 4000, .prompt_spread = 0.4, .prompt_max = 12000, .output_median = 60, .output_max = 300, .ttft_target = 2.0};
constexpr RequestKind long_output{
    .prompt_median = 250, .prompt_max = 2000, .output_median = 700, .output_spread = 0.5, .output_max = 2000, .itl_target = 0.04};

RequestKind with_share(RequestKind kind, double share) {
  kind.share = share;
  return kind;
}

std::vector<RequestKind> mixed() {
  return {with_share(chat, 0.6), with_share(retrieval, 0.2), with_share(long_output, 0.2)};
}

// Five phases of equal length.
std::vector<LoadRequest> shifting(double load, double seconds, std::uint64_t seed) {
  std::vector<LoadRequest> requests;
  std::mt19937_64 random(seed);
  for (const auto& kinds : {std::vector{chat}, std::vector{retrieval}, std::vector{conversation}, mixed(), std::vector{chat}}) {
    append_phase(requests, {}, kinds, load, seconds / 5, random);
  }
  return requests;
}

std::vector<LoadRequest> steady(const std::vector<RequestKind>& kinds, double load, double seconds, std::uint64_t seed) {
  std::vector<LoadRequest> requests;
  std::mt19937_64 random(seed);
  append_phase(requests, {}, kinds, load, seconds, random);
  return requests;
}

double with_settings(const std::vector<LoadRequest>& requests, PriorityPolicy policy, std::int32_t budget, std::int32_t margin) {
  ServeOptions options;
  options.knobs.priority_policy = policy;
  options.knobs.max_num_batched_tokens = budget;
  options.knobs.deadline_margin = margin;
  return attainment(requests, serve(options, requests));
}

double with_deadline(const std::vector<LoadRequest>& requests, std::int32_t margin = 20) {
  return with_settings(requests, PriorityPolicy::Deadline, 8192, margin);
}

double best_static(const std::vector<LoadRequest>& requests) {
  double best = 0;
  for (const std::int32_t budget : {768, 1280, 2048})
    best = std::max(best, with_settings(requests, PriorityPolicy::DecodeFirst, budget, 0));
  return best;
}

TEST(DeadlineStudy, keeps_a_shifting_load_near_capacity_without_being_retuned) {
  for (const double load : {0.7, 0.95}) {
    const std::vector<LoadRequest> requests = shifting(load, 100, 7);
    const double deadline = with_deadline(requests);
    const double fixed = best_static(requests);
    std::printf("load %.2f, shifting: Deadline %.3f, best static %.3f\n", load, deadline, fixed);
    EXPECT_GE(deadline, 0.97);
    EXPECT_GE(deadline, fixed - 0.005);
  }
}

TEST(DeadlineStudy, serves_most_in_time_where_there_is_more_than_the_machine_can_do) {
  const std::vector<LoadRequest> requests = shifting(1.1, 200, 7);
  const double deadline = with_deadline(requests);
  const double fixed = best_static(requests);
  std::printf("load 1.10, shifting: Deadline %.3f, best static %.3f\n", deadline, fixed);
  EXPECT_GE(deadline, 0.95);
  EXPECT_LT(fixed, 0.4);
}

TEST(DeadlineStudy, each_kind_of_load_by_itself_does_well) {
  for (const auto& [name, kind] : {std::pair("chat", chat), std::pair("conversation", conversation),
                                   std::pair("retrieval", retrieval), std::pair("long output", long_output)}) {
    const double near = with_deadline(steady({kind}, 0.95, 60, 3));
    const double over = with_deadline(steady({kind}, 1.1, 60, 3));
    std::printf("%s: %.3f at 0.95, %.3f at 1.10\n", name, near, over);
    EXPECT_GE(near, 0.96) << name;
    EXPECT_GE(over, 0.88) << name;
  }
}

// The scatter of steps is kept back by itself, so that a small margin does not spoil the answers.
TEST(DeadlineStudy, a_small_margin_is_no_risk) {
  const std::vector<LoadRequest> requests = steady({conversation}, 0.7, 60, 5);
  for (const std::int32_t margin : {0, 10, 40}) {
    const double share = with_deadline(requests, margin);
    std::printf("conversation at 0.70, margin %d: %.3f\n", margin, share);
    EXPECT_GE(share, 0.97) << "margin " << margin;
  }
}

// On a machine of a sixteenth of the speed, so that an hour has fewer steps. Everybody is served, and within what scheduler.h
// promises relative to the work that was there before.
void overload(double load, double seconds, double attainment_least) {
  ServeOptions options;
  Machine& machine = options.machine;
  for (double* part : {&machine.weights, &machine.per_token, &machine.per_context, &machine.per_pair}) *part *= 16;
  std::vector<RequestKind> kinds = mixed();
  for (RequestKind& kind : kinds) {
    kind.ttft_target *= 8;
    kind.itl_target *= 8;
  }
  std::vector<LoadRequest> requests;
  std::mt19937_64 random(11);
  append_phase(requests, machine, kinds, load, seconds, random);
  const ServeResult result = serve(options, requests);
  ASSERT_EQ(result.counts.preemptions, 0u) << "then tokens are computed twice";
  std::vector<double> longest(kinds.size(), 0);
  std::vector<std::int32_t> served(kinds.size(), 0);
  double nearest = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const Served& got = result.requests[i];
    const auto kind = static_cast<std::size_t>(requests[i].kind);
    ASSERT_TRUE(got.ended > 0 && !got.rejected) << "request " << i;
    ++served[kind];
    longest[kind] = std::max(longest[kind], got.ttft);
    constexpr double steps = 8 + 1;
    const double bound = steps * (4.0 * static_cast<double>(got.older_tokens) +
                                  static_cast<double>(result.chunk_tokens_max) * static_cast<double>(got.older_count + 1));
    nearest = std::max(nearest, static_cast<double>(got.prefill_tokens) / bound);
    EXPECT_LE(static_cast<double>(got.prefill_tokens), bound) << "request " << i << " came at " << requests[i].arrival;
    if (testing::Test::HasFailure()) return;
  }
  std::printf("load %.1f for %.0f s: attainment %.3f; longest waits %.0f, %.0f, %.0f s; %.2f of the bound; %d waited at most\n",
              load, seconds, attainment(requests, result), longest[0], longest[1], longest[2], nearest, result.waiting_max);
  for (const std::int32_t count : served) EXPECT_GT(count, 100);
  EXPECT_GT(attainment(requests, result), attainment_least);
}

TEST(DeadlineStudy, an_hour_of_overload_starves_nobody) {
  overload(1.1, 3600, 0.9);
}

// So much more than it can do that without their turns those put behind would wait until the load ends.
TEST(DeadlineStudy, heavy_overload_starves_nobody) {
  overload(1.6, 3600, 0.6);
}

}  // namespace
}  // namespace rubato::policies
