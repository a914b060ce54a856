// SPDX-License-Identifier: Apache-2.0
#include "daemon/regimes_command.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <system_error>
#include <utility>

#include "daemon/calibration_file.h"
#include "daemon/durable_write.h"

namespace rubato {
namespace {

namespace fs = std::filesystem;

constexpr std::uintmax_t bytes_max = 64UL << 20;

fs::path inbox_of(const fs::path& state_directory) {
  return state_directory / "regimes.import.json";
}

/// Errors name the file.
Result<tuner::ImportedRegimes> read_regimes(const fs::path& path) {
  const Result<std::string> text = read_whole(path, bytes_max);
  if (!text) return Unexpected(Error(text.error()));
  Result<tuner::ImportedRegimes> regimes = tuner::regimes_from_json(*text);
  if (regimes) return regimes;
  Error error = std::move(regimes).error();
  error.message = path.string() + ": " + error.message;
  return Unexpected(std::move(error));
}

/// What waits to be taken in; empty where nothing does.
Result<std::optional<tuner::ImportedRegimes>> waiting_regimes(const fs::path& state_directory) {
  std::error_code error;
  const fs::path inbox = inbox_of(state_directory);
  if (!fs::exists(inbox, error)) return std::optional<tuner::ImportedRegimes>();
  Result<tuner::ImportedRegimes> waiting = read_regimes(inbox);
  if (!waiting) return Unexpected(std::move(waiting).error());
  return std::optional(*std::move(waiting));
}

bool is_for(const tuner::ImportedRegimes& waiting, const std::string& model_key) {
  return waiting.model_key == any_model_key || waiting.model_key == model_key;
}

std::vector<tuner::Regime> merged(std::vector<tuner::Regime> known, std::span<const tuner::Regime> others, std::int64_t now) {
  tuner::RegimeMemory memory;
  memory.load(std::move(known));
  memory.merge(others, now);
  return {memory.regimes().begin(), memory.regimes().end()};
}

Result<std::unique_ptr<tuner::Journal>> open_journal(const fs::path& state_directory) {
  return tuner::Journal::open_existing((state_directory / "journal.sqlite").string());
}

Result<void> check_folder(const fs::path& state_directory) {
  std::error_code error;
  if (fs::is_directory(state_directory, error)) return {};
  return unexpected(ErrorCode::NotFound, "--state", state_directory.string() + " is not a folder");
}

/// The model that imported regimes are for, or why they cannot be taken.
Result<std::string> accepted_key(const std::vector<std::string>& known, const std::string& found, const Options& options) {
  const std::string& own = !options.model_key.empty() || known.empty() ? options.model_key : known.front();
  if (options.model_keys == ModelKeys::Any) return own.empty() ? std::string(any_model_key) : own;
  if (own.empty() || own == found) return found;
  return unexpected(
      ErrorCode::Conflict, "modelKey",
      fmt::format("modelKey: the regimes are of '{}', this folder is of '{}'; --any-model takes them all the same", found, own));
}

int fail(const Error& error) {
  fmt::print(stderr, "rubatod: {}\n", error.message);
  return 1;
}

}  // namespace

std::vector<std::string> known_models(const fs::path& state_directory) {
  std::vector<std::string> known;
  const auto add = [&known](const std::string& key) {
    if (std::find(known.begin(), known.end(), key) == known.end()) known.push_back(key);
  };
  if (const auto calibration = read_calibration(calibration_path(state_directory))) add(calibration->model_key);
  if (const auto journal = open_journal(state_directory)) {
    if (const auto models = (*journal)->regime_models()) std::for_each(models->begin(), models->end(), add);
  }
  return known;
}

Result<ExportedRegimes> exported_regimes(const fs::path& state_directory, const std::string& model_key, std::int64_t now) {
  if (auto folder = check_folder(state_directory); !folder) return Unexpected(std::move(folder).error());
  const std::vector<std::string> known = known_models(state_directory);
  auto waiting = waiting_regimes(state_directory);
  if (!waiting) return Unexpected(std::move(waiting).error());
  ExportedRegimes exported{.model_key = model_key, .regimes = {}, .other_models = {}};
  if (exported.model_key.empty() && !known.empty()) exported.model_key = known.front();
  if (exported.model_key.empty() && *waiting) exported.model_key = (*waiting)->model_key;
  if (exported.model_key.empty()) {
    return unexpected(ErrorCode::NotFound, state_directory.string() + ": no regimes: no daemon has tuned with this --state yet");
  }
  for (const std::string& other : known) {
    if (other != exported.model_key) exported.other_models.push_back(other);
  }
  const auto journal = open_journal(state_directory);
  if (!journal && journal.error().code != ErrorCode::NotFound) return Unexpected(Error(journal.error()));
  if (journal) {
    auto regimes = (*journal)->regimes(exported.model_key);
    if (!regimes) return Unexpected(std::move(regimes).error());
    exported.regimes = *std::move(regimes);
  }
  if (*waiting && is_for(**waiting, exported.model_key))
    exported.regimes = merged(std::move(exported.regimes), (*waiting)->regimes, now);
  return exported;
}

Result<RegimesImport> import_regimes(const fs::path& state_directory, const std::string& text, const Options& options,
                                     std::int64_t now) {
  if (auto folder = check_folder(state_directory); !folder) return Unexpected(std::move(folder).error());
  const Result<tuner::ImportedRegimes> read = tuner::regimes_from_json(text);
  if (!read) return Unexpected(Error(read.error()));
  Result<std::string> key = accepted_key(known_models(state_directory), read->model_key, options);
  if (!key) return Unexpected(std::move(key).error());
  auto waiting = waiting_regimes(state_directory);
  if (!waiting) return Unexpected(std::move(waiting).error());
  std::vector<tuner::Regime> before;
  if (*waiting) {
    if ((*waiting)->model_key != *key) {
      return unexpected(ErrorCode::Conflict, "modelKey",
                        fmt::format("{}: regimes of '{}' wait there to be taken in; start the daemon first, or remove the file",
                                    inbox_of(state_directory).string(), (*waiting)->model_key));
    }
    before = std::move((*waiting)->regimes);
  }
  const std::vector<tuner::Regime> all = merged(std::move(before), read->regimes, now);
  auto written = write_durably(inbox_of(state_directory), tuner::regimes_to_json(all, *key));
  if (!written) return Unexpected(std::move(written).error());
  return RegimesImport{.model_key = *std::move(key), .read = read->regimes.size(), .waiting = all.size()};
}

Result<std::size_t> take_imported_regimes(tuner::Journal& journal, const std::string& model_key, const fs::path& state_directory,
                                          std::int64_t now) {
  const auto waiting = waiting_regimes(state_directory);
  if (!waiting) return Unexpected(Error(waiting.error()));
  if (!*waiting) return std::size_t{0};
  const fs::path inbox = inbox_of(state_directory);
  if (!is_for(**waiting, model_key)) {
    return unexpected(ErrorCode::Conflict, fmt::format("{}: regimes of '{}' wait there, this is '{}'", inbox.string(),
                                                       (*waiting)->model_key, model_key));
  }
  auto known = journal.regimes(model_key);
  if (!known) return Unexpected(std::move(known).error());
  if (auto kept = journal.keep_regimes(model_key, merged(*std::move(known), (*waiting)->regimes, now)); !kept)
    return Unexpected(std::move(kept).error());
  std::error_code error;
  fs::remove(inbox, error);
  if (error) return unexpected(ErrorCode::Internal, inbox.string() + ": cannot be removed: " + error.message());
  return (*waiting)->regimes.size();
}

std::int64_t wall_seconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

int export_regimes_command(const Options& options) {
  const Result<ExportedRegimes> exported = exported_regimes(options.state, options.model_key, wall_seconds());
  if (!exported) return fail(exported.error());
  for (const std::string& other : exported->other_models)
    fmt::print(stderr, "rubatod: not exported: regimes of '{}'; --model-key names whose\n", other);
  std::string text = tuner::regimes_to_json(exported->regimes, exported->model_key);
  if (!text.ends_with('\n')) text += '\n';
  if (options.output.empty()) {
    fmt::print("{}", text);
    return 0;
  }
  if (const auto written = write_durably(options.output, text); !written) return fail(written.error());
  fmt::print(stderr, "rubatod: {} regimes of '{}' written to {}\n", exported->regimes.size(), exported->model_key,
             options.output);
  return 0;
}

int import_regimes_command(const Options& options) {
  const Result<std::string> text = read_whole(options.input, bytes_max);
  if (!text) return fail(text.error());
  Result<RegimesImport> imported = import_regimes(options.state, *text, options, wall_seconds());
  if (!imported) {
    Error error = std::move(imported).error();
    if (error.code == ErrorCode::InvalidArgument) error.message = options.input + ": " + error.message;
    return fail(error);
  }
  fmt::print("{} regimes read, {} wait for {}; they take effect when the daemon next starts with --state {}\n", imported->read,
             imported->waiting,
             imported->model_key == any_model_key ? std::string("whatever model starts next") : "'" + imported->model_key + "'",
             options.state);
  return 0;
}

}  // namespace rubato
