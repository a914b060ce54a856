// SPDX-License-Identifier: Apache-2.0
#include "tuner/journal_database.h"

#include <cctype>
#include <filesystem>
#include <system_error>

namespace rubato::tuner {

namespace {

constexpr int schema_version = 2;
constexpr int application_id = 0x52554254;  // "RUBT", so that another program's database is told apart
constexpr int busy_timeout_milliseconds = 200;

constexpr const char* schema = R"sql(
CREATE TABLE trials(
  id INTEGER PRIMARY KEY, number INTEGER NOT NULL, model_key TEXT NOT NULL,
  ttft_nanoseconds INTEGER NOT NULL, itl_nanoseconds INTEGER NOT NULL, attainment_percent INTEGER NOT NULL,
  bounds TEXT NOT NULL, knobs TEXT NOT NULL, measured TEXT NOT NULL, outcome TEXT NOT NULL,
  source TEXT NOT NULL DEFAULT '', expected TEXT, ended_seconds INTEGER NOT NULL DEFAULT 0);
CREATE INDEX trials_by_key ON trials(model_key, ttft_nanoseconds, itl_nanoseconds, attainment_percent, id);
CREATE TABLE decisions(
  id INTEGER PRIMARY KEY, time_milliseconds INTEGER NOT NULL, phase INTEGER NOT NULL, trial INTEGER NOT NULL,
  knobs TEXT, reason TEXT NOT NULL, message TEXT NOT NULL,
  trial_number INTEGER NOT NULL DEFAULT 0, source TEXT NOT NULL DEFAULT '', seen TEXT, expected TEXT, expected_incumbent TEXT);
)sql";

constexpr const char* regimes_schema = R"sql(
CREATE TABLE regimes(
  id INTEGER PRIMARY KEY, model_key TEXT NOT NULL, number INTEGER NOT NULL,
  ttft_nanoseconds INTEGER NOT NULL, itl_nanoseconds INTEGER NOT NULL, attainment_percent INTEGER NOT NULL,
  load TEXT NOT NULL, knobs TEXT NOT NULL, evidence TEXT NOT NULL,
  visits INTEGER NOT NULL, last_seen_seconds INTEGER NOT NULL, measured_seconds INTEGER NOT NULL);
CREATE INDEX regimes_by_model ON regimes(model_key, id);
)sql";

// Decisions of version 1 were stamped by a clock that starts with the process: when they were made is not known any more.
constexpr const char* from_version_1 = R"sql(
ALTER TABLE trials ADD COLUMN source TEXT NOT NULL DEFAULT '';
ALTER TABLE trials ADD COLUMN expected TEXT;
ALTER TABLE trials ADD COLUMN ended_seconds INTEGER NOT NULL DEFAULT 0;
ALTER TABLE decisions RENAME COLUMN time_nanoseconds TO time_milliseconds;
UPDATE decisions SET time_milliseconds = 0;
ALTER TABLE decisions ADD COLUMN trial_number INTEGER NOT NULL DEFAULT 0;
ALTER TABLE decisions ADD COLUMN source TEXT NOT NULL DEFAULT '';
ALTER TABLE decisions ADD COLUMN seen TEXT;
ALTER TABLE decisions ADD COLUMN expected TEXT;
ALTER TABLE decisions ADD COLUMN expected_incumbent TEXT;
)sql";

std::string stamp() {
  return "PRAGMA user_version=" + std::to_string(schema_version) + "; PRAGMA application_id=" + std::to_string(application_id) +
         ";";
}

/// Why a database cannot be used, with SQLite's code where it said so; no text: it can.
struct Fault {
  std::string text;
  int code = SQLITE_OK;
};

Fault sqlite_fault(sqlite3* database, const std::string& what) {
  return {what + ": " + sqlite3_errmsg(database), sqlite3_errcode(database)};
}

Fault in_one_transaction(sqlite3* database, const std::string& text) {
  Transaction transaction(database);
  // The code is taken before the roll back replaces it.
  if (!transaction.begun() || !execute(database, text + stamp())) return sqlite_fault(database, "its tables cannot be made");
  return transaction.commit() ? Fault{} : sqlite_fault(database, "its tables cannot be made");
}

Fault integrity_fault(sqlite3* database) {
  Statement check(database, "PRAGMA quick_check(1)");
  if (check.step() != SQLITE_ROW) return sqlite_fault(database, "its integrity cannot be checked");
  return check.text(0) == "ok" ? Fault{} : Fault{check.text(0)};
}

struct Header {
  std::int64_t version = 0;
  std::int64_t application = 0;
  std::int64_t tables = 0;
};

Fault read_header(sqlite3* database, Header& header) {
  const auto version = number_from(database, "PRAGMA user_version");
  const auto application = number_from(database, "PRAGMA application_id");
  if (!version || !application) return sqlite_fault(database, "its header cannot be read");
  const auto tables = number_from(database, "SELECT count(*) FROM sqlite_master");
  if (!tables) return sqlite_fault(database, "its table list cannot be read");
  header = {*version, *application, *tables};
  return {};
}

std::string version_text(std::int64_t version) {
  return "its schema version is " + std::to_string(version) + ", this program knows " + std::to_string(schema_version);
}

Fault fault_for_writing(sqlite3* database) {
  if (!execute(database, "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;")) {
    return sqlite_fault(database, "it cannot be written");
  }
  Header header;
  if (Fault fault = read_header(database, header); !fault.text.empty()) return fault;
  if (header.version == 0 && header.application == 0 && header.tables == 0) {
    return in_one_transaction(database, std::string(schema) + regimes_schema);
  }
  if (header.application != application_id) return Fault{"it is another program's database"};
  if (header.version < 1 || header.version > schema_version) return Fault{version_text(header.version)};
  if (Fault fault = integrity_fault(database); !fault.text.empty()) return fault;
  if (header.version == 1) return in_one_transaction(database, std::string(from_version_1) + regimes_schema);
  return {};
}

Fault fault_for_reading(sqlite3* database) {
  Header header;
  if (Fault fault = read_header(database, header); !fault.text.empty()) return fault;
  if (header.tables == 0) return Fault{"it is empty"};
  if (header.application != application_id) return Fault{"it is another program's database"};
  if (header.version < 1 || header.version > schema_version) return Fault{version_text(header.version)};
  if (header.version < schema_version) {
    return Fault{version_text(header.version) + "; the daemon brings it up to date when it starts"};
  }
  return integrity_fault(database);
}

OpenedDatabase open_with(const std::string& path, int flags, Fault (*fault_of)(sqlite3*)) {
  sqlite3* raw = nullptr;
  const int code = sqlite3_open_v2(path.c_str(), &raw, flags | SQLITE_OPEN_NOMUTEX, nullptr);
  OpenedDatabase result{Database(raw), {}, code};
  if (code != SQLITE_OK) {
    result.unusable = raw ? sqlite3_errmsg(raw) : "out of memory";
    return result;
  }
  sqlite3_busy_timeout(raw, busy_timeout_milliseconds);
  const Fault fault = fault_of(raw);
  result.unusable = fault.text;
  result.code = fault.code;
  return result;
}

/// As the path of a `file:` URI.
std::string escaped(const std::string& path) {
  constexpr const char* digits = "0123456789ABCDEF";
  std::string text;
  for (const char c : path) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) || c == '/' || c == '.' || c == '-' || c == '_') {
      text += c;
    } else {
      text += {'%', digits[byte >> 4], digits[byte & 15]};
    }
  }
  return text;
}

}  // namespace

Result<void> execute(sqlite3* database, const std::string& text) {
  char* message = nullptr;
  if (sqlite3_exec(database, text.c_str(), nullptr, nullptr, &message) == SQLITE_OK) return {};
  const std::string found = message ? message : "unknown error";
  sqlite3_free(message);
  return unexpected(ErrorCode::Internal, found);
}

std::optional<std::int64_t> number_from(sqlite3* database, const char* text) {
  Statement statement(database, text);
  if (statement.step() != SQLITE_ROW) return std::nullopt;
  return statement.integer(0);
}

Transaction::Transaction(sqlite3* database) : database_(database), open_(execute(database, "BEGIN IMMEDIATE").has_value()) {}

Transaction::~Transaction() {
  if (open_) (void)execute(database_, "ROLLBACK");
}

Result<void> Transaction::commit() {
  auto done = execute(database_, "COMMIT");
  if (done) open_ = false;
  return done;
}

OpenedDatabase open_database(const std::string& path) {
  return open_with(path, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, fault_for_writing);
}

OpenedDatabase open_database_to_read(const std::string& path) {
  OpenedDatabase opened = open_with(path, SQLITE_OPEN_READONLY, fault_for_reading);
  std::error_code error;
  // Reading beside a writer needs a shared file next to the journal. In a folder that this process may not write it is missing
  // when nobody writes; then the journal does not change either and can be read as it lies there.
  if (!opened.unusable.empty() && opened.code == SQLITE_CANTOPEN && !std::filesystem::exists(path + "-wal", error)) {
    opened = open_with("file:" + escaped(path) + "?immutable=1", SQLITE_OPEN_READONLY | SQLITE_OPEN_URI, fault_for_reading);
  }
  return opened;
}

}  // namespace rubato::tuner
