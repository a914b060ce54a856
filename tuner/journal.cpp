// SPDX-License-Identifier: Apache-2.0
#include "tuner/journal.h"

#include <sqlite3.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <system_error>

#include "tuner/journal_database.h"
#include "tuner/journal_rows.h"

namespace rubato::tuner {

namespace {

/// Held by another process, a full disk and the like: the file is not damaged, and moving it aside would lose what it knows.
bool is_of_the_place(int code) {
  return code == SQLITE_BUSY || code == SQLITE_LOCKED || code == SQLITE_FULL || code == SQLITE_READONLY || code == SQLITE_PERM ||
         code == SQLITE_NOMEM;
}

/// The database with its write-ahead files, so that a new one does not inherit them.
std::string move_aside(const std::string& path) {
  std::error_code error;
  std::filesystem::rename(path, path + ".damaged", error);
  if (error) return error.message();
  for (const char* suffix : {"-wal", "-shm"}) std::filesystem::remove(path + suffix, error);
  return {};
}

template <class Value>
std::optional<std::string> row_or_nothing(const std::optional<Value>& value) {
  return value ? std::optional(to_row(*value)) : std::nullopt;
}

}  // namespace

struct Journal::State {
  Database database;
  JournalOptions options;
  std::string cold_start_reason;

  [[nodiscard]] Result<void> failed(const char* what) const {
    return unexpected(ErrorCode::Internal, std::string("journal: ") + what + ": " + sqlite3_errmsg(database.get()));
  }
};

Journal::Journal(std::unique_ptr<State> state) : state_(std::move(state)) {}
Journal::~Journal() = default;

Result<std::unique_ptr<Journal>> Journal::open(const std::string& path, const JournalOptions& options) {
  OpenedDatabase opened = open_database(path);
  std::string cold_start;
  if (!opened.unusable.empty()) {
    const std::string first = opened.unusable;
    const int code = opened.code;
    opened.database.reset();
    std::error_code error;
    if (is_of_the_place(code) || !std::filesystem::is_regular_file(path, error)) {
      return unexpected(ErrorCode::Internal, path + ": cannot open the journal: " + first);
    }
    if (const std::string problem = move_aside(path); !problem.empty()) {
      return unexpected(ErrorCode::Internal,
                        path + ": the journal is damaged (" + first + ") and cannot be moved aside: " + problem);
    }
    cold_start = path + ": " + first + "; moved to " + path + ".damaged, starting without history";
    opened = open_database(path);
    if (!opened.unusable.empty())
      return unexpected(ErrorCode::Internal, path + ": cannot create the journal: " + opened.unusable);
  }
  auto state = std::make_unique<State>();
  state->database = std::move(opened.database);
  state->options = options;
  state->cold_start_reason = cold_start;
  return std::unique_ptr<Journal>(new Journal(std::move(state)));
}

Result<std::unique_ptr<Journal>> Journal::open_existing(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return unexpected(ErrorCode::NotFound, path + ": there is no journal");
  if (!std::filesystem::is_regular_file(path, error)) return unexpected(ErrorCode::InvalidArgument, path + ": it is no file");
  OpenedDatabase opened = open_database_to_read(path);
  if (!opened.unusable.empty()) {
    return unexpected(ErrorCode::Internal, path + ": the journal cannot be read: " + opened.unusable);
  }
  auto state = std::make_unique<State>();
  state->database = std::move(opened.database);
  return std::unique_ptr<Journal>(new Journal(std::move(state)));
}

const std::string& Journal::cold_start_reason() const {
  return state_->cold_start_reason;
}

Result<void> Journal::record(const JournalTrial& entry) {
  sqlite3* database = state_->database.get();
  Statement insert(database,
                   "INSERT INTO trials(number, model_key, ttft_nanoseconds, itl_nanoseconds, attainment_percent, bounds, knobs, "
                   "measured, outcome, source, expected, ended_seconds) VALUES(?,?,?,?,?,?,?,?,?,?,?,?)");
  insert.bind(entry.trial.number).bind(entry.model_key).bind(entry.objectives.ttft.count()).bind(entry.objectives.itl.count());
  insert.bind(std::int64_t{entry.objectives.attainment}).bind(to_row(entry.bounds)).bind(to_row(entry.trial.knobs));
  insert.bind(to_row(entry.trial.window)).bind(entry.trial.outcome).bind(entry.trial.source);
  insert.bind(row_or_nothing(entry.trial.expected)).bind(entry.trial.ended);
  if (insert.step() != SQLITE_DONE) return state_->failed("a trial was not recorded");
  Statement prune(database, "DELETE FROM trials WHERE id <= (SELECT max(id) FROM trials) - ?");
  prune.bind(state_->options.trials_max);
  return prune.step() == SQLITE_DONE ? Result<void>() : state_->failed("old trials were not removed");
}

Result<void> Journal::record(const JournalDecision& entry) {
  sqlite3* database = state_->database.get();
  const Decision& decision = entry.decision;
  Statement insert(database,
                   "INSERT INTO decisions(time_milliseconds, phase, trial, knobs, reason, message, trial_number, source, seen, "
                   "expected, expected_incumbent) VALUES(?,?,?,?,?,?,?,?,?,?,?)");
  insert.bind(entry.time).bind(static_cast<std::int64_t>(decision.phase)).bind(std::int64_t{decision.trial ? 1 : 0});
  insert.bind(row_or_nothing(decision.apply)).bind(decision.reason).bind(decision.message);
  insert.bind(decision.trial_number).bind(decision.source).bind(row_or_nothing(decision.seen));
  insert.bind(row_or_nothing(decision.expected)).bind(row_or_nothing(decision.expected_incumbent));
  if (insert.step() != SQLITE_DONE) return state_->failed("a decision was not recorded");
  Statement prune(database, "DELETE FROM decisions WHERE id <= (SELECT max(id) FROM decisions) - ?");
  prune.bind(state_->options.decisions_max);
  return prune.step() == SQLITE_DONE ? Result<void>() : state_->failed("old decisions were not removed");
}

namespace {

constexpr const char* trial_columns =
    "SELECT number, knobs, measured, outcome, source, expected, ended_seconds, bounds FROM trials ";

/// From a row of trial_columns. Empty where it cannot be read.
std::optional<Trial> trial_from(const Statement& row) {
  const auto knobs = knobs_from_row(row.text(1));
  const auto window = window_from_row(row.text(2));
  if (!knobs || !window) return std::nullopt;
  return Trial{.number = row.integer(0),
               .knobs = *knobs,
               .window = *window,
               .outcome = row.text(3),
               .source = row.text(4),
               .expected = expected_from_row(row.text(5)),
               .ended = row.integer(6)};
}

}  // namespace

Result<std::vector<JournalTrial>> Journal::trials(const std::string& model_key, const ObjectivesSpec& objectives,
                                                  std::int64_t count_max) const {
  const std::string text = std::string(trial_columns) +
                           "WHERE model_key=? AND ttft_nanoseconds=? AND itl_nanoseconds=? AND attainment_percent=? "
                           "ORDER BY id DESC LIMIT ?";
  Statement query(state_->database.get(), text.c_str());
  query.bind(model_key).bind(objectives.ttft.count()).bind(objectives.itl.count());
  query.bind(std::int64_t{objectives.attainment}).bind(std::max<std::int64_t>(0, count_max));
  std::vector<JournalTrial> result;
  int code = query.step();
  for (; code == SQLITE_ROW; code = query.step()) {
    const auto trial = trial_from(query);
    const auto bounds = bounds_from_row(query.text(7));
    if (!trial || !bounds) continue;
    result.push_back({.trial = *trial, .model_key = model_key, .objectives = objectives, .bounds = *bounds});
  }
  if (code != SQLITE_DONE) return Unexpected(state_->failed("trials cannot be read").error());
  std::reverse(result.begin(), result.end());
  return result;
}

Result<std::vector<Trial>> Journal::finished_trials(std::int64_t count_max) const {
  const std::string text = std::string(trial_columns) + "ORDER BY id DESC LIMIT ?";
  Statement query(state_->database.get(), text.c_str());
  query.bind(std::max<std::int64_t>(0, count_max));
  std::vector<Trial> result;
  int code = query.step();
  for (; code == SQLITE_ROW; code = query.step()) {
    if (auto trial = trial_from(query)) result.push_back(std::move(*trial));
  }
  if (code != SQLITE_DONE) return Unexpected(state_->failed("trials cannot be read").error());
  std::reverse(result.begin(), result.end());
  return result;
}

Result<std::vector<JournalDecision>> Journal::decisions(const DecisionFilter& filter) const {
  Statement query(state_->database.get(),
                  "SELECT time_milliseconds, phase, trial, knobs, reason, message, trial_number, source, seen, expected, "
                  "expected_incumbent FROM decisions WHERE time_milliseconds >= ? ORDER BY id DESC LIMIT ?");
  query.bind(filter.since).bind(std::max<std::int64_t>(0, filter.count_max));
  std::vector<JournalDecision> result;
  int code = query.step();
  for (; code == SQLITE_ROW; code = query.step()) {
    const std::int64_t phase = query.integer(1);
    if (phase < 0 || phase > static_cast<std::int64_t>(Phase::NoData)) continue;
    JournalDecision one;
    one.time = query.integer(0);
    one.decision.phase = static_cast<Phase>(phase);
    one.decision.trial = query.integer(2) != 0;
    one.decision.apply = knobs_from_row(query.text(3));
    one.decision.reason = query.text(4);
    one.decision.message = query.text(5);
    one.decision.trial_number = query.integer(6);
    one.decision.source = query.text(7);
    one.decision.seen = window_from_row(query.text(8));
    one.decision.expected = expected_from_row(query.text(9));
    one.decision.expected_incumbent = expected_from_row(query.text(10));
    result.push_back(std::move(one));
  }
  if (code != SQLITE_DONE) return Unexpected(state_->failed("decisions cannot be read").error());
  std::reverse(result.begin(), result.end());
  return result;
}

Result<void> Journal::keep_regimes(const std::string& model_key, std::span<const Regime> regimes) {
  sqlite3* database = state_->database.get();
  Transaction transaction(database);
  if (!transaction.begun()) return state_->failed("regimes were not kept");
  Statement clear(database, "DELETE FROM regimes WHERE model_key=?");
  if (clear.bind(model_key).step() != SQLITE_DONE) return state_->failed("old regimes were not removed");
  for (const Regime& regime : regimes) {
    Statement insert(database,
                     "INSERT INTO regimes(model_key, number, ttft_nanoseconds, itl_nanoseconds, attainment_percent, load, knobs, "
                     "evidence, visits, last_seen_seconds, measured_seconds) VALUES(?,?,?,?,?,?,?,?,?,?,?)");
    insert.bind(model_key).bind(regime.number).bind(regime.objectives.ttft.count()).bind(regime.objectives.itl.count());
    insert.bind(std::int64_t{regime.objectives.attainment}).bind(to_row(regime.load)).bind(to_row(regime.best));
    insert.bind(to_row(regime.evidence)).bind(std::int64_t{regime.visits}).bind(regime.last_seen).bind(regime.measured);
    if (insert.step() != SQLITE_DONE) return state_->failed("a regime was not kept");
  }
  Statement prune(database, "DELETE FROM regimes WHERE id NOT IN (SELECT id FROM regimes ORDER BY id DESC LIMIT ?)");
  if (prune.bind(state_->options.regimes_max).step() != SQLITE_DONE) return state_->failed("old regimes were not removed");
  return transaction.commit() ? Result<void>() : state_->failed("regimes were not kept");
}

Result<std::vector<Regime>> Journal::regimes(const std::string& model_key) const {
  Statement query(state_->database.get(),
                  "SELECT number, ttft_nanoseconds, itl_nanoseconds, attainment_percent, load, knobs, evidence, visits, "
                  "last_seen_seconds, measured_seconds FROM regimes WHERE model_key=? ORDER BY id LIMIT ?");
  query.bind(model_key).bind(state_->options.regimes_max);
  std::vector<Regime> result;
  int code = query.step();
  for (; code == SQLITE_ROW; code = query.step()) {
    const auto load = load_from_row(query.text(4));
    const auto knobs = knobs_from_row(query.text(5));
    const auto evidence = evidence_from_row(query.text(6));
    const std::int64_t attainment = query.integer(3);
    const std::int64_t visits = query.integer(7);
    if (!load || !knobs || !evidence || query.integer(1) <= 0 || query.integer(2) <= 0) continue;
    if (attainment < 1 || attainment > 100 || visits < 1 || visits > std::numeric_limits<std::int32_t>::max()) continue;
    result.push_back({.number = query.integer(0),
                      .load = *load,
                      .best = *knobs,
                      .evidence = *evidence,
                      .objectives = {.ttft = Duration(query.integer(1)),
                                     .itl = Duration(query.integer(2)),
                                     .attainment = static_cast<std::int32_t>(attainment)},
                      .visits = static_cast<std::int32_t>(visits),
                      .last_seen = query.integer(8),
                      .measured = query.integer(9)});
  }
  if (code != SQLITE_DONE) return Unexpected(state_->failed("regimes cannot be read").error());
  return result;
}

Result<std::vector<std::string>> Journal::regime_models() const {
  Statement query(state_->database.get(), "SELECT model_key FROM regimes GROUP BY model_key ORDER BY max(id) DESC");
  std::vector<std::string> result;
  int code = query.step();
  for (; code == SQLITE_ROW; code = query.step()) result.push_back(query.text(0));
  if (code != SQLITE_DONE) return Unexpected(state_->failed("models cannot be read").error());
  return result;
}

std::int64_t Journal::last_trial_number() const {
  return number_from(state_->database.get(), "SELECT coalesce(max(number), 0) FROM trials").value_or(0);
}

}  // namespace rubato::tuner
