// SPDX-License-Identifier: Apache-2.0
// A node without devices, for tests: it drives a LaneGroup under virtual time with steps of several lanes and copies open at
// once, and checks from outside, by its own books, what lane_group.h promises. It keeps for every KV block what stands in it,
// token by token, so that a block with two owners, a copy that comes too late or one that was forgotten shows in the contents
// themselves.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "policies/lane_group.h"
#include "tests/policies/scheduler_harness.h"

namespace rubato::policies {

struct NodeOptions {
  LaneGroupLimits limits{.each = {.max_model_len = 4096, .max_num_seqs = 8, .max_waiting = 64, .block_count = 1024}};
  KnobValues knobs{};
  std::string replay;  // printed with every failure
};

/// What a client saw of one request, and where the node stands with it.
struct NodeStream {
  RequestOptions options;
  TimePoint arrival;
  std::int32_t computed = 0;  // tokens with KV, by the rows seen
  std::int32_t sampled = 0;
  std::int32_t preemptions = 0;
  bool recomputing = false;  // after a preemption, until it samples again
  bool ended = false;
  bool cancelled = false;
  std::optional<LaneIndex> in_step;
  std::optional<LaneIndex> lane;  // of its last row
  std::optional<LaneIndex> first_token_lane;
  std::optional<TimePoint> first_token;
  TimePoint last_token;
  std::vector<BlockId> blocks;  // of its last row
  Text text;                    // what is known
  bool admitted = false;        // holds blocks

  [[nodiscard]] std::int32_t known() const { return options.prompt_tokens + sampled; }
  [[nodiscard]] bool decoding() const { return sampled > 0 && computed == known() - 1 && !recomputing; }
  [[nodiscard]] bool will_decode() const { return options.max_new_tokens - sampled > 1; }
};

/// A copy that the node was told to carry out.
struct NodeCopy {
  CopyOrder order;
  std::vector<BlockCopy> blocks;
  TimePoint ordered;
  std::optional<TimePoint> unwanted;  // since when the order is not wanted any more
};

/// A step of a lane that is being carried out.
struct NodeStep {
  bool open = false;
  std::vector<PlannedRow> rows;
  std::vector<std::vector<BlockId>> blocks;  // by row
  StepFeatures features;
  TimePoint began;
};

class Node {
 public:
  explicit Node(const NodeOptions& options)
      : options_(options), group_(options.limits, Settings{.number = 1, .knobs = options.knobs}) {
    settings_ = group_.settings();
    steps_open_.resize(static_cast<std::size_t>(group_.lane_count()));
    for (std::int32_t device = 0; device < options.limits.devices; ++device)
      memory_.emplace_back(options.limits.each, options.replay);
    group_.watch_freed();
  }

  LaneGroup& group() { return group_; }
  [[nodiscard]] TimePoint now() const { return now_; }
  void advance(Duration duration) { now_ += duration; }
  [[nodiscard]] std::uint64_t steps() const { return steps_; }
  [[nodiscard]] std::uint64_t fingerprint() const { return fingerprint_; }
  [[nodiscard]] std::uint64_t preemptions() const { return preemptions_; }
  NodeStream& stream(SequenceId id) { return streams_.at(id); }
  [[nodiscard]] const std::map<SequenceId, NodeStream>& streams() const { return streams_; }
  [[nodiscard]] const std::vector<SequenceId>& live() const { return live_; }
  [[nodiscard]] const KnobValues& knobs() const { return settings_.knobs; }
  [[nodiscard]] bool open(std::int32_t lane) const { return steps_open_[static_cast<std::size_t>(lane)].open; }
  [[nodiscard]] const NodeStep& step(std::int32_t lane) const { return steps_open_[static_cast<std::size_t>(lane)]; }
  [[nodiscard]] bool any_open() const {
    return std::any_of(steps_open_.begin(), steps_open_.end(), [](const NodeStep& step) { return step.open; });
  }
  [[nodiscard]] const std::vector<NodeCopy>& copies() const { return copies_; }

  /// Adds a request that must be accepted.
  SequenceId add(const RequestOptions& request) {
    const SequenceId id{next_id_++};
    NodeStream stream;
    if (request.follows) {
      stream.text = streams_.at(*request.follows).text;
    } else {
      fit(stream.text, request.shared_tokens, 1'000'000 + request.family);
    }
    fit(stream.text, request.prompt_tokens, id.value);
    note_text(stream.text, 0);
    const std::vector<BlockHash> prefix = hashes_of(stream.text);
    const Result<void> result = group_.add({.id = id,
                                            .arrival = now_,
                                            .prompt_tokens = request.prompt_tokens,
                                            .max_new_tokens = request.max_new_tokens,
                                            .ttft_target = request.ttft_target,
                                            .itl_target = request.itl_target,
                                            .prefix = prefix});
    EXPECT_TRUE(result.has_value()) << (result ? "" : result.error().message) << options_.replay;
    stream.options = request;
    if (stream.options.output_tokens == 0) stream.options.output_tokens = request.max_new_tokens;
    stream.arrival = now_;
    streams_.emplace(id, stream);
    live_.push_back(id);
    return id;
  }

  void cancel(SequenceId id) {
    EXPECT_TRUE(group_.cancel(id)) << "sequence " << id.value << options_.replay;
    EXPECT_FALSE(group_.cancel(id)) << "sequence " << id.value << options_.replay;
    finish(id);
    streams_.at(id).cancelled = true;
    watch_copies();
  }

  void set(const KnobValues& knobs) {
    group_.apply({.number = settings_.number + 1, .knobs = knobs}, now_);
    settings_ = group_.settings();
    watch_copies();
  }

  /// Asks the lane for a step. False when nothing can run there.
  bool plan(std::int32_t lane) {
    NodeStep& step = steps_open_[static_cast<std::size_t>(lane)];
    const LaneCounts before = group_.counts(LaneIndex{lane});
    const std::int32_t reserved_before = reserved();
    const StepPlan& plan = group_.plan(LaneIndex{lane}, now_);
    for (const SequenceId id : plan.preempted) lose(id);
    watch_copies();
    if (reserved() > reserved_before) check_free_slots();
    if (plan.empty()) return false;
    mix(static_cast<std::uint64_t>(lane));
    step.open = true;
    step.rows = plan.rows;
    step.blocks.clear();
    step.features = plan.features;
    step.began = now_;
    for (const PlannedRow& row : plan.rows) step.blocks.emplace_back(row.blocks.begin(), row.blocks.end());
    check_plan(LaneIndex{lane}, plan, before);
    for (std::size_t i = 0; i < step.rows.size(); ++i) {
      const PlannedRow& row = step.rows[i];
      streams_.at(row.id).in_step = LaneIndex{lane};
      streams_.at(row.id).lane = LaneIndex{lane};
      streams_.at(row.id).blocks = step.blocks[i];
    }
    return true;
  }

  void complete(std::int32_t lane) {
    NodeStep& step = steps_open_[static_cast<std::size_t>(lane)];
    ASSERT_TRUE(step.open);
    ++steps_;
    outcomes_.clear();
    for (std::size_t i = 0; i < step.rows.size(); ++i) book(LaneIndex{lane}, step.rows[i], step.blocks[i]);
    step.open = false;
    group_.complete(LaneIndex{lane}, outcomes_, now_, std::max(now_ - step.began, Duration(1)));
    for (const SequenceId id : group_.preempted_at_end(LaneIndex{lane})) {
      if (!streams_.at(id).ended) lose(id);
    }
    watch_copies();
  }

  /// One step of one lane by itself. False when nothing can run there.
  bool run(std::int32_t lane, Duration duration = std::chrono::milliseconds(1)) {
    if (!plan(lane)) return false;
    advance(duration);
    complete(lane);
    return true;
  }

  /// One step of every lane that has something to run, side by side. False when none has.
  bool run_all(Duration duration = std::chrono::milliseconds(1)) {
    for (std::int32_t lane = 0; lane < group_.lane_count(); ++lane) static_cast<void>(plan(lane));
    if (!any_open()) return false;
    advance(duration);
    for (std::int32_t lane = 0; lane < group_.lane_count(); ++lane) {
      if (open(lane)) complete(lane);
    }
    return true;
  }

  /// Carries out every copy there is and answers it.
  void copy_all() {
    while (const std::optional<std::uint64_t> epoch = take_copy()) answer(*epoch, Answer::Copied);
  }

  /// The device failed: what the step was to write is lost.
  void abandon(std::int32_t lane) {
    NodeStep& step = steps_open_[static_cast<std::size_t>(lane)];
    ASSERT_TRUE(step.open);
    for (const PlannedRow& row : step.rows) streams_.at(row.id).in_step.reset();
    step.open = false;
    group_.abandon(LaneIndex{lane});
    watch_copies();
  }

  /// Takes the next order to copy, if there is one.
  std::optional<std::uint64_t> take_copy() {
    const std::optional<CopyOrder> order = group_.next_copy(now_);
    if (!order) return std::nullopt;
    NodeCopy copy{.order = *order, .blocks = {order->blocks.begin(), order->blocks.end()}, .ordered = now_, .unwanted = {}};
    mix(order->epoch);
    EXPECT_TRUE(!copy.blocks.empty() || order->state) << options_.replay;
    EXPECT_TRUE(copy.blocks.empty() || options_.limits.each.blocks_hold_keys) << "blocks that hold nothing" << options_.replay;
    if (order->state) check_source_state(*order);
    EXPECT_NE(group_.device_of(order->from), group_.device_of(order->to)) << options_.replay;
    for (const BlockCopy& block : copy.blocks) {
      check_source(*order, block.from);
      EXPECT_FALSE(in_open_step(order->to, block.to))
          << "block " << block.to.value << " is copied into and used by a step" << options_.replay;
      mix(static_cast<std::uint64_t>(block.from.value) << 32U | static_cast<std::uint64_t>(block.to.value));
    }
    copies_.push_back(copy);
    return order->epoch;
  }

  enum class Answer : std::uint8_t { Copied, Failed };
  /// Carries the copy out and answers it. What a copier that looks at wants() before each block could write, it writes. An order
  /// that the node forgot meanwhile may be answered too.
  void answer(std::uint64_t epoch, Answer what) {
    const auto found = find_copy(epoch);
    if (found != copies_.end()) {
      const std::size_t items = found->blocks.size() + (found->order.state ? 1 : 0);  // a state comes last
      const std::size_t count = found->unwanted          ? (now_ - *found->unwanted < options_.limits.handoff_lease ? 1 : 0)
                                : what == Answer::Failed ? items / 2
                                                         : items;
      MadeUpMemory& from = memory_of(found->order.from);
      MadeUpMemory& to = memory_of(found->order.to);
      for (std::size_t i = 0; i < count; ++i) {
        if (i < found->blocks.size()) {
          to.block(found->blocks[i].to) = from.block(found->blocks[i].from);
        } else {
          to.state(found->order.state->to) = from.state(found->order.state->from);
        }
      }
      copies_.erase(found);
    }
    const Result<void> outcome =
        what == Answer::Copied ? Result<void>{} : Result<void>{unexpected(ErrorCode::Unavailable, "the link is down")};
    group_.copied(epoch, outcome, now_);
    watch_copies();
  }

  void expire() {
    group_.expire(now_);
    watch_copies();
  }
  /// Loses an order: it is never answered.
  void forget(std::uint64_t epoch) {
    const auto found = find_copy(epoch);
    if (found != copies_.end()) copies_.erase(found);
  }

  /// Everything is where it was before the first request. Nothing may be on its way any more.
  void check_empty() {
    EXPECT_TRUE(group_.idle()) << options_.replay;
    EXPECT_EQ(group_.copies_open(), 0) << options_.replay;
    const SchedulerCounts totals = group_.totals();
    EXPECT_EQ(totals.free_blocks, totals.block_count) << options_.replay;
    EXPECT_EQ(totals.running + totals.waiting, 0) << options_.replay;
    EXPECT_EQ(totals.states_running, 0) << options_.replay;
    std::int32_t live_states = 0;
    for (const MadeUpMemory& memory : memory_) live_states += memory.live_states();
    EXPECT_EQ(live_states, totals.states_snapshot) << "what is cached lives, all else is dead" << options_.replay;
    for (std::int32_t lane = 0; lane < group_.lane_count(); ++lane) {
      EXPECT_EQ(group_.counts(LaneIndex{lane}).reserved, 0) << options_.replay;
      EXPECT_EQ(group_.counts(LaneIndex{lane}).to_move, 0) << options_.replay;
    }
    group_.check_integrity();
  }

 private:
  MadeUpMemory& memory_of(LaneIndex lane) { return memory_[static_cast<std::size_t>(group_.device_of(lane))]; }
  static std::vector<BlockId> copy_of(std::span<const BlockId> blocks) { return {blocks.begin(), blocks.end()}; }
  void note_text(const Text& text, std::size_t from) {
    for (std::size_t i = from; i < text.size(); ++i) position_of_[text[i]] = static_cast<std::int32_t>(i);
  }
  std::vector<NodeCopy>::iterator find_copy(std::uint64_t epoch) {
    return std::find_if(copies_.begin(), copies_.end(), [&](const NodeCopy& copy) { return copy.order.epoch == epoch; });
  }
  void mix(std::uint64_t value) { fingerprint_ = (fingerprint_ ^ value) * 0x100000001b3ULL; }

  // After each call of the group: what died, and which copies nobody wants any more.
  void watch_copies() {
    for (std::int32_t device = 0; device < options_.limits.devices; ++device) {
      const std::vector<BlockId> blocks = copy_of(group_.take_freed(device));
      memory_[static_cast<std::size_t>(device)].kill(blocks, group_.take_freed_states(device));
    }
    for (NodeCopy& copy : copies_) {
      if (!copy.unwanted && !group_.wants(copy.order.epoch)) copy.unwanted = now_;
    }
  }

  // A block to be copied holds tokens of one text. Where it is not full, its sequence stands still.
  void check_source(const CopyOrder& order, BlockId from) {
    const MadeUpMemory::Block& block = memory_of(order.from).block(from);
    ASSERT_TRUE(position_of_.contains(block[0]))
        << "a copy of block " << from.value << " which nobody computed" << options_.replay;
    const std::int32_t first = position_of_.at(block[0]);
    std::int32_t last = first;
    for (std::int32_t i = 1; i < kv_block_tokens; ++i) {
      const auto found = position_of_.find(block[static_cast<std::size_t>(i)]);
      if (found == position_of_.end() || found->second != first + i) break;
      last = found->second;
    }
    if (last == first + kv_block_tokens - 1) return;
    const bool stands_still = std::any_of(live_.begin(), live_.end(), [&](SequenceId id) {
      const NodeStream& stream = streams_.at(id);
      return !stream.in_step && stream.computed == last + 1 &&
             stream.text[static_cast<std::size_t>(last)] == block[static_cast<std::size_t>(last - first)];
    });
    EXPECT_TRUE(stands_still) << "block " << from.value << " is copied before it is full" << options_.replay;
  }

  // A state to be copied is that of a sequence that stands still, after all that it has computed.
  void check_source_state(const CopyOrder& order) {
    const std::uint64_t held = memory_of(order.from).state(order.state->from);
    const bool stands_still = std::any_of(live_.begin(), live_.end(), [&](SequenceId id) {
      const NodeStream& stream = streams_.at(id);
      return !stream.in_step && stream.computed > 0 && stream.text[static_cast<std::size_t>(stream.computed - 1)] == held;
    });
    EXPECT_TRUE(held != 0 && stands_still) << "state " << order.state->from.value << " is copied too early" << options_.replay;
  }

  bool in_open_step(LaneIndex lane, BlockId block) const {
    for (std::int32_t other = 0; other < group_.lane_count(); ++other) {
      const NodeStep& step = steps_open_[static_cast<std::size_t>(other)];
      if (!step.open || group_.device_of(LaneIndex{other}) != group_.device_of(lane)) continue;
      for (const std::vector<BlockId>& blocks : step.blocks) {
        if (std::find(blocks.begin(), blocks.end(), block) != blocks.end()) return true;
      }
    }
    return false;
  }

  void lose(SequenceId id) {
    NodeStream& stream = streams_.at(id);
    EXPECT_FALSE(stream.ended) << "sequence " << id.value << options_.replay;
    EXPECT_FALSE(stream.in_step) << "sequence " << id.value << " lost its blocks within a step" << options_.replay;
    stream.computed = 0;
    stream.admitted = false;
    stream.recomputing = stream.sampled > 0;
    ++stream.preemptions;
    ++preemptions_;
    mix(id.value);
  }

  void check_plan(LaneIndex lane, const StepPlan& plan, const LaneCounts& before) {
    EXPECT_EQ(plan.settings_number, settings_.number) << options_.replay;
    std::int32_t tokens = 0;
    std::int32_t last_chunks = 0;
    std::set<SequenceId> ids;
    check_writes(plan, options_.replay);
    for (const PlannedRow& row : plan.rows) {
      NodeStream& stream = streams_.at(row.id);
      if (!stream.admitted) {
        EXPECT_TRUE(row.begin % kv_block_tokens == 0 && row.begin < stream.known()) << options_.replay;
        EXPECT_TRUE(row.begin == 0 || options_.limits.each.prefix_caching.enabled) << options_.replay;
        stream.computed = row.begin;
        stream.admitted = true;
      }
      EXPECT_FALSE(stream.ended) << "sequence " << row.id.value << options_.replay;
      EXPECT_FALSE(stream.in_step) << "sequence " << row.id.value << " is in two steps" << options_.replay;
      EXPECT_EQ(row.begin, stream.computed) << "a hole or a repetition in sequence " << row.id.value << options_.replay;
      EXPECT_TRUE(row.count >= 1 && row.begin + row.count <= stream.known()) << options_.replay;
      EXPECT_EQ(row.samples, row.begin + row.count == stream.known()) << options_.replay;
      EXPECT_EQ(row.decode, stream.decoding()) << "sequence " << row.id.value << options_.replay;
      EXPECT_TRUE(ids.insert(row.id).second) << "a sequence twice in a step" << options_.replay;
      EXPECT_EQ(static_cast<std::int32_t>(row.blocks.size()), blocks_for_tokens(row.begin + row.count)) << options_.replay;
      for (const BlockId block : row.blocks) {
        for (const NodeCopy& copy : copies_) {
          if (copy.unwanted || group_.device_of(copy.order.to) != group_.device_of(lane)) continue;
          for (const BlockCopy& copied : copy.blocks) {
            EXPECT_NE(copied.to, block) << "sequence " << row.id.value << " uses a block that is copied into" << options_.replay;
          }
        }
      }
      memory_of(lane).begin(row, row.blocks, stream.text);
      if (row.samples && !row.decode && stream.will_decode()) ++last_chunks;
      tokens += row.count;
      mix(row.id.value);
      mix(static_cast<std::uint64_t>(row.begin) << 32U | static_cast<std::uint64_t>(row.count));
    }
    EXPECT_LE(tokens, settings_.knobs.max_num_batched_tokens) << options_.replay;
    EXPECT_EQ(plan.features.tokens, tokens) << options_.replay;
    const LaneCounts after = group_.counts(lane);
    EXPECT_LE(after.scheduler.running, std::max(settings_.knobs.max_num_seqs, before.scheduler.running))
        << "admitted while draining" << options_.replay;
    check_last_chunks(after, last_chunks);
  }

  // Nobody comes to need a decode slot that is not there.
  void check_last_chunks(const LaneCounts& lane, std::int32_t last_chunks) {
    if (lane.role != LaneRole::Prefill || settings_.knobs.reservation == Reservation::PrefillComplete) return;
    EXPECT_LE(last_chunks, lane.reserved + group_.copies_open()) << "a last chunk without a decode slot" << options_.replay;
  }

  [[nodiscard]] std::int32_t reserved() const {
    std::int32_t reserved = 0;
    for (std::int32_t lane = 0; lane < group_.lane_count(); ++lane) reserved += group_.counts(LaneIndex{lane}).reserved;
    return reserved;
  }

  // After somebody got one.
  void check_free_slots() {
    std::int32_t slots = 0;
    for (std::int32_t lane = 0; lane < group_.lane_count(); ++lane) {
      const LaneCounts counts = group_.counts(LaneIndex{lane});
      if (counts.role == LaneRole::Decode) slots += std::max(settings_.knobs.max_num_seqs - counts.scheduler.running, 0);
    }
    EXPECT_LE(reserved(), slots) << "more slots are reserved than are free" << options_.replay;
  }

  void book(LaneIndex lane, const PlannedRow& row, const std::vector<BlockId>& blocks) {
    NodeStream& stream = streams_.at(row.id);
    stream.in_step.reset();
    memory_of(lane).end(row, blocks, stream.text);
    if (stream.ended) {  // cancelled meanwhile
      if (row.samples) outcomes_.push_back({.id = row.id, .finished = (row.id.value & 1U) != 0});
      return;
    }
    stream.computed += row.count;
    if (!row.samples) return;
    ++stream.sampled;
    say(stream.text);
    note_text(stream.text, stream.text.size() - 1);
    stream.recomputing = false;
    stream.last_token = now_;
    if (!stream.first_token) {
      stream.first_token = now_;
      stream.first_token_lane = lane;
    }
    const bool finished = stream.sampled == stream.options.output_tokens;
    outcomes_.push_back({.id = row.id, .finished = finished});
    const auto length = static_cast<std::int32_t>(stream.text.size());
    if (length % kv_block_tokens == 0) outcomes_.back().filled = hash_of_block(stream.text, length / kv_block_tokens - 1);
    if (finished) finish(row.id);
  }

  void finish(SequenceId id) {
    streams_.at(id).ended = true;
    live_.erase(std::find(live_.begin(), live_.end(), id));
  }

  NodeOptions options_;
  LaneGroup group_;
  Settings settings_;
  TimePoint now_{std::chrono::seconds(1)};
  std::uint64_t next_id_ = 1;
  std::uint64_t steps_ = 0;
  std::uint64_t preemptions_ = 0;
  std::uint64_t fingerprint_ = 0xcbf29ce484222325ULL;
  std::map<SequenceId, NodeStream> streams_;
  std::vector<SequenceId> live_;  // oldest first
  std::vector<NodeStep> steps_open_;
  std::vector<NodeCopy> copies_;                                 // ordered and not answered
  std::vector<MadeUpMemory> memory_;                             // by device
  std::unordered_map<std::uint64_t, std::int32_t> position_of_;  // of every number in a text
  std::vector<RowOutcome> outcomes_;
};

}  // namespace rubato::policies
