// SPDX-License-Identifier: Apache-2.0
#include "tuner/journal.h"

#include <sqlite3.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "tuner/journal_rows.h"

namespace rubato::tuner {

namespace {

constexpr int schema_version = 2;
constexpr int application_id = 0x52554254;  // "RUBT", so that another program's database is told apart
constexpr int busy_timeout_milliseconds = 200;

constexpr const char* schema = R"sql(
CREATE TABLE trials(
  id INTEGER PRIMARY KEY, number INTEGER NOT NULL, model_key TEXT NOT NULL,
  ttft_nanoseconds INTEGER NOT NULL, itl_nanoseconds INTEGER NOT NULL, attainment_percent INTEGER NOT NULL,
  bounds TEXT NOT NULL, knobs TEXT NOT NULL, measured TEXT NOT NULL, outcome TEXT NOT NULL);
CREATE INDEX trials_by_key ON trials(model_key, ttft_nanoseconds, itl_nanoseconds, attainment_percent, id);
CREATE TABLE decisions(
  id INTEGER PRIMARY KEY, time_milliseconds INTEGER NOT NULL, phase INTEGER NOT NULL, trial INTEGER NOT NULL,
  knobs TEXT, reason TEXT NOT NULL, message TEXT NOT NULL);
)sql";

struct CloseDatabase {
  void operator()(sqlite3* database) const { sqlite3_close_v2(database); }
};
using Database = std::unique_ptr<sqlite3, CloseDatabase>;

struct FinishStatement {
  void operator()(sqlite3_stmt* statement) const { sqlite3_finalize(statement); }
};

/// A prepared statement with its bindings; a failure anywhere shows when it is stepped.
class Statement {
 public:
  Statement(sqlite3* database, const char* text) {
    sqlite3_stmt* raw = nullptr;
    prepared_ = sqlite3_prepare_v2(database, text, -1, &raw, nullptr) == SQLITE_OK;
    statement_.reset(raw);
  }
  Statement& bind(std::int64_t value) {
    if (prepared_) sqlite3_bind_int64(statement_.get(), ++bound_, value);
    return *this;
  }
  Statement& bind(const std::string& value) {
    if (prepared_) {
      sqlite3_bind_text(statement_.get(), ++bound_, value.data(), static_cast<int>(value.size()), SQLITE_TRANSIENT);
    }
    return *this;
  }
  Statement& bind_null() {
    if (prepared_) sqlite3_bind_null(statement_.get(), ++bound_);
    return *this;
  }
  int step() { return prepared_ ? sqlite3_step(statement_.get()) : SQLITE_ERROR; }
  [[nodiscard]] std::int64_t integer(int column) const { return sqlite3_column_int64(statement_.get(), column); }
  [[nodiscard]] bool is_null(int column) const { return sqlite3_column_type(statement_.get(), column) == SQLITE_NULL; }
  [[nodiscard]] std::string text(int column) const {
    const auto* data = reinterpret_cast<const char*>(sqlite3_column_text(statement_.get(), column));
    return data ? std::string(data, static_cast<std::size_t>(sqlite3_column_bytes(statement_.get(), column))) : std::string();
  }

 private:
  std::unique_ptr<sqlite3_stmt, FinishStatement> statement_;
  bool prepared_ = false;
  int bound_ = 0;
};

Result<void> execute(sqlite3* database, const std::string& text) {
  char* message = nullptr;
  if (sqlite3_exec(database, text.c_str(), nullptr, nullptr, &message) == SQLITE_OK) return {};
  const std::string found = message ? message : "unknown error";
  sqlite3_free(message);
  return unexpected(ErrorCode::Internal, found);
}

std::optional<std::int64_t> pragma(sqlite3* database, const char* text) {
  Statement statement(database, text);
  if (statement.step() != SQLITE_ROW) return std::nullopt;
  return statement.integer(0);
}

/// Why this open database cannot be used as it is; empty when it can. A new file gets its tables here.
std::string reason_unusable(sqlite3* database) {
  if (const auto result = execute(database, "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;"); !result) {
    return result.error().message;
  }
  const auto version = pragma(database, "PRAGMA user_version");
  const auto application = pragma(database, "PRAGMA application_id");
  if (!version || !application) return "its header cannot be read";
  const auto tables = pragma(database, "SELECT count(*) FROM sqlite_master");
  if (!tables) return "its table list cannot be read";
  if (*version == 0 && *application == 0 && *tables == 0) {
    const auto made =
        execute(database, std::string("BEGIN IMMEDIATE;") + schema + "PRAGMA user_version=" + std::to_string(schema_version) +
                              "; PRAGMA application_id=" + std::to_string(application_id) + "; COMMIT;");
    return made ? std::string() : made.error().message;
  }
  if (*application != application_id) return "it is another program's database";
  if (*version != schema_version) {
    return "its schema version is " + std::to_string(*version) + ", this program knows " + std::to_string(schema_version);
  }
  Statement check(database, "PRAGMA quick_check(1)");
  if (check.step() != SQLITE_ROW) return "its integrity cannot be checked";
  return check.text(0) == "ok" ? std::string() : check.text(0);
}

struct Opened {
  Database database;
  std::string unusable;
};

Opened open_database(const std::string& path) {
  sqlite3* raw = nullptr;
  const int code = sqlite3_open_v2(path.c_str(), &raw, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX, nullptr);
  Opened result{Database(raw), {}};
  if (code != SQLITE_OK) {
    result.unusable = raw ? sqlite3_errmsg(raw) : "out of memory";
    return result;
  }
  sqlite3_busy_timeout(raw, busy_timeout_milliseconds);
  result.unusable = reason_unusable(raw);
  return result;
}

/// The database with its write-ahead files, so that a new one does not inherit them.
std::string move_aside(const std::string& path) {
  std::error_code error;
  std::filesystem::rename(path, path + ".damaged", error);
  if (error) return error.message();
  for (const char* suffix : {"-wal", "-shm"}) std::filesystem::remove(path + suffix, error);
  return {};
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
  Opened opened = open_database(path);
  std::string cold_start;
  if (!opened.unusable.empty()) {
    const std::string first = opened.unusable;
    // A file that another process holds is not damaged; moving it aside would take that process's journal away.
    const int code = opened.database ? sqlite3_errcode(opened.database.get()) : SQLITE_NOMEM;
    opened.database.reset();
    std::error_code error;
    if (code == SQLITE_BUSY || code == SQLITE_LOCKED || !std::filesystem::is_regular_file(path, error)) {
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

const std::string& Journal::cold_start_reason() const {
  return state_->cold_start_reason;
}

Result<void> Journal::record(const JournalTrial& entry) {
  sqlite3* database = state_->database.get();
  Statement insert(database,
                   "INSERT INTO trials(number, model_key, ttft_nanoseconds, itl_nanoseconds, attainment_percent, bounds, knobs, "
                   "measured, outcome) VALUES(?,?,?,?,?,?,?,?,?)");
  insert.bind(entry.trial.number).bind(entry.model_key).bind(entry.objectives.ttft.count()).bind(entry.objectives.itl.count());
  insert.bind(std::int64_t{entry.objectives.attainment}).bind(to_row(entry.bounds)).bind(to_row(entry.trial.knobs));
  insert.bind(to_row(entry.trial.window)).bind(entry.trial.outcome);
  if (insert.step() != SQLITE_DONE) return state_->failed("a trial was not recorded");
  Statement prune(database, "DELETE FROM trials WHERE id <= (SELECT max(id) FROM trials) - ?");
  prune.bind(state_->options.trials_max);
  return prune.step() == SQLITE_DONE ? Result<void>() : state_->failed("old trials were not removed");
}

Result<void> Journal::record(const JournalDecision& entry) {
  sqlite3* database = state_->database.get();
  const Decision& decision = entry.decision;
  Statement insert(database,
                   "INSERT INTO decisions(time_milliseconds, phase, trial, knobs, reason, message) VALUES(?,?,?,?,?,?)");
  insert.bind(entry.time).bind(static_cast<std::int64_t>(decision.phase));
  insert.bind(std::int64_t{decision.trial ? 1 : 0});
  if (decision.apply) {
    insert.bind(to_row(*decision.apply));
  } else {
    insert.bind_null();
  }
  insert.bind(decision.reason).bind(decision.message);
  if (insert.step() != SQLITE_DONE) return state_->failed("a decision was not recorded");
  Statement prune(database, "DELETE FROM decisions WHERE id <= (SELECT max(id) FROM decisions) - ?");
  prune.bind(state_->options.decisions_max);
  return prune.step() == SQLITE_DONE ? Result<void>() : state_->failed("old decisions were not removed");
}

Result<std::vector<JournalTrial>> Journal::trials(const std::string& model_key, const ObjectivesSpec& objectives,
                                                  std::int64_t count_max) const {
  Statement query(state_->database.get(),
                  "SELECT number, bounds, knobs, measured, outcome FROM trials WHERE model_key=? AND ttft_nanoseconds=? AND "
                  "itl_nanoseconds=? AND attainment_percent=? ORDER BY id DESC LIMIT ?");
  query.bind(model_key).bind(objectives.ttft.count()).bind(objectives.itl.count());
  query.bind(std::int64_t{objectives.attainment}).bind(std::max<std::int64_t>(0, count_max));
  std::vector<JournalTrial> result;
  int code = query.step();
  for (; code == SQLITE_ROW; code = query.step()) {
    const auto bounds = bounds_from_row(query.text(1));
    const auto knobs = knobs_from_row(query.text(2));
    const auto window = window_from_row(query.text(3));
    if (!bounds || !knobs || !window) continue;
    result.push_back({.trial = {.number = query.integer(0), .knobs = *knobs, .window = *window, .outcome = query.text(4)},
                      .model_key = model_key,
                      .objectives = objectives,
                      .bounds = *bounds});
  }
  if (code != SQLITE_DONE) return Unexpected(state_->failed("trials cannot be read").error());
  std::reverse(result.begin(), result.end());
  return result;
}

Result<std::vector<JournalDecision>> Journal::decisions(std::int64_t count_max) const {
  Statement query(state_->database.get(),
                  "SELECT time_milliseconds, phase, trial, knobs, reason, message FROM decisions ORDER BY id DESC LIMIT ?");
  query.bind(std::max<std::int64_t>(0, count_max));
  std::vector<JournalDecision> result;
  int code = query.step();
  for (; code == SQLITE_ROW; code = query.step()) {
    const std::int64_t phase = query.integer(1);
    if (phase < 0 || phase > static_cast<std::int64_t>(Phase::NoData)) continue;
    JournalDecision one;
    one.time = query.integer(0);
    one.decision.phase = static_cast<Phase>(phase);
    one.decision.trial = query.integer(2) != 0;
    if (!query.is_null(3)) one.decision.apply = knobs_from_row(query.text(3));
    one.decision.reason = query.text(4);
    one.decision.message = query.text(5);
    result.push_back(std::move(one));
  }
  if (code != SQLITE_DONE) return Unexpected(state_->failed("decisions cannot be read").error());
  std::reverse(result.begin(), result.end());
  return result;
}

std::int64_t Journal::last_trial_number() const {
  return pragma(state_->database.get(), "SELECT coalesce(max(number), 0) FROM trials").value_or(0);
}

}  // namespace rubato::tuner
