// SPDX-License-Identifier: Apache-2.0
// The journal's SQLite file: statements, opening, the schema and how earlier versions of it are brought up to date.
#pragma once

#include <sqlite3.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "manifests/result.h"

namespace rubato::tuner {

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
  Statement& bind(const std::optional<std::string>& value) { return value ? bind(*value) : bind_null(); }
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

/// Runs statements that answer nothing.
Result<void> execute(sqlite3* database, const std::string& text);

/// The first number that a query answers.
[[nodiscard]] std::optional<std::int64_t> number_from(sqlite3* database, const char* text);

/// All that is done in its life happens, or nothing: without commit() it is rolled back.
class Transaction {
 public:
  explicit Transaction(sqlite3* database);
  ~Transaction();
  Transaction(const Transaction&) = delete;
  Transaction& operator=(const Transaction&) = delete;
  [[nodiscard]] bool begun() const { return open_; }
  Result<void> commit();

 private:
  sqlite3* database_;
  bool open_;
};

/// An open database, or why it cannot be used.
struct OpenedDatabase {
  Database database;
  std::string unusable;
  int code = SQLITE_OK;  // SQLite's, of the fault
};

/// Makes the tables of a new file and migrates one of an earlier version, in one transaction.
[[nodiscard]] OpenedDatabase open_database(const std::string& path);

/// Changes nothing.
[[nodiscard]] OpenedDatabase open_database_to_read(const std::string& path);

}  // namespace rubato::tuner
