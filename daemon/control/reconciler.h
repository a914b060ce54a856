// SPDX-License-Identifier: Apache-2.0
// The reconciler: the thread-safe owner of the Engine object. It takes what the manifest, clients and the tuner want to
// ControlState, hands the effective knob values to Serving when they differ from what runs, keeps what must survive a restart,
// and answers with the object's state. It has no thread: the main thread ticks it, HTTP threads and the tuning thread call in.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "daemon/control/conditions.h"
#include "daemon/control/control_state.h"
#include "daemon/control/engine_resource.h"
#include "daemon/control/events.h"
#include "daemon/control/health.h"
#include "daemon/control/lane_watch.h"
#include "daemon/control/manifest_watch.h"
#include "daemon/control/state_file.h"
#include "daemon/control/tuning_target.h"
#include "daemon/metrics/metrics.h"
#include "daemon/serving.h"

namespace rubato::control {

struct ReconcilerOptions {
  std::string state_directory;  // empty: nothing set over the API survives a restart
  std::string node;             // names the daemon in events
  std::function<WallTime()> clock;
  std::function<std::string()> make_uid;  // asked once, when no state was kept
};

/// The object at one moment.
struct EngineSnapshot {
  Json object;
  std::string resource_version;
};

struct PatchAnswer {
  EngineSnapshot engine;
  std::vector<std::string> warnings;
};
enum class DryRun : std::uint8_t { None, All };

/// Level-driven: every entry ends by bringing what runs to what is wanted, whatever changed before. Critical sections are short;
/// the lane is never waited for. metrics must outlive it.
class Reconciler final : public TuningTarget {
 public:
  /// The manifest has been read and is good; serving comes with attach() once the model is loaded.
  Reconciler(const ReadManifest& manifest, ReconcilerOptions options, Metrics& metrics);

  /// What to start serving with.
  [[nodiscard]] KnobValues knobs();
  [[nodiscard]] ObjectivesSpec objectives();
  /// serving must outlive every further call.
  void attach(Serving& serving);

  /// What ManifestWatch saw. A bad manifest changes nothing but a condition, a metric and an event.
  void on_manifest(const ManifestWatch::Outcome& outcome);
  /// Ends overrides whose time has come, retries a failed save, refreshes conditions. Call about once a second.
  void tick();

  [[nodiscard]] EngineSnapshot engine();
  [[nodiscard]] std::variant<PatchAnswer, StatusError> patch(const PatchRequest& request, DryRun dry_run);
  [[nodiscard]] std::vector<Json> events();
  /// Never waits for anything but a few loads.
  [[nodiscard]] ServingHealth health();
  [[nodiscard]] std::string name();
  /// What the tuning loop reported last; before its first report, nothing.
  [[nodiscard]] TuningReport tuning_report();

  [[nodiscard]] TuningInput tuning_input() override;
  [[nodiscard]] Result<std::uint64_t> propose(const KnobValues& knobs, const std::string& reason,
                                              const std::string& message) override;
  void report(const TuningReport& report) override;

 private:
  // All of these with mutex_ held.
  void converge(SettingsSource source, WallTime now);
  void save(WallTime now);
  void expire(WallTime now);
  void note_condition_changes(const std::vector<Condition>& before, const std::vector<Condition>& after, WallTime now);
  [[nodiscard]] Json status_of(const ControlState& state, WallTime now);
  [[nodiscard]] std::optional<TwinUse> twin_use() const;
  [[nodiscard]] EngineSnapshot refresh(WallTime now);

  const ReconcilerOptions options_;
  Metrics& metrics_;

  // Probes read these without the mutex: a disk that is slow to flush must not look like a dead daemon.
  std::atomic<Serving*> serving_{nullptr};
  StallDetector stalls_;

  std::mutex mutex_;
  StateFile file_;
  LoadedState loaded_;
  ControlState state_;
  EventLog events_;
  LaneWatch lanes_;
  std::optional<KnobValues> applied_;
  std::uint64_t settings_number_ = 0;
  std::optional<ObjectivesSpec> objectives_applied_;
  std::optional<std::string> manifest_error_;
  std::optional<TuningReport> report_;
  std::int64_t trial_seen_ = 0;
  std::vector<Condition> conditions_;
  Json shown_;  // the object as last answered, without its version
  std::uint64_t resource_version_ = 0;
  std::optional<SavedState> saved_;  // what the state file holds
  WallTime next_save_;
  std::chrono::milliseconds save_backoff_{0};
};

}  // namespace rubato::control
