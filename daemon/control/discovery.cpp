// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/discovery.h"

#include "daemon/control/status_error.h"
#include "daemon/control/trials.h"

namespace rubato::control {

using Json = nlohmann::ordered_json;

namespace {

Json group_entry() {
  const Json version{{"groupVersion", api_version}, {"version", version_name}};
  return {{"name", api_group}, {"versions", Json::array({version})}, {"preferredVersion", version}};
}

}  // namespace

Json discovery_groups() {
  return {{"kind", "APIGroupList"}, {"apiVersion", "v1"}, {"groups", Json::array({group_entry()})}};
}

Json discovery_group() {
  Json group{{"kind", "APIGroup"}, {"apiVersion", "v1"}};
  group.update(group_entry());
  return group;
}

Json discovery_resources() {
  // Cluster-scoped: with `kubectl -s URL` the namespace comes from the user's context, and a namespaced engine would be missing
  // there.
  const Json engines{{"name", engine_plural},
                     {"singularName", engine_singular},
                     {"namespaced", false},
                     {"kind", engine_kind},
                     {"verbs", Json::array({"get", "list", "patch"})},
                     {"shortNames", Json::array({"eng"})},
                     {"categories", Json::array({"all"})}};
  const Json status{{"name", std::string(engine_plural) + "/status"},
                    {"singularName", ""},
                    {"namespaced", false},
                    {"kind", engine_kind},
                    {"verbs", Json::array({"get"})}};
  const Json regimes{{"name", std::string(engine_plural) + "/regimes"},
                     {"singularName", ""},
                     {"namespaced", false},
                     {"kind", "RegimeList"},
                     {"verbs", Json::array({"get"})}};
  const Json trials{{"name", trial_plural},
                    {"singularName", "trial"},
                    {"namespaced", false},
                    {"kind", trial_kind},
                    {"verbs", Json::array({"get", "list"})}};
  return {{"kind", "APIResourceList"},
          {"apiVersion", "v1"},
          {"groupVersion", api_version},
          {"resources", Json::array({engines, status, regimes, trials})}};
}

Json core_versions() {
  return {{"kind", "APIVersions"}, {"versions", Json::array({"v1"})}};
}

Json core_resources() {
  const Json events{{"name", "events"},
                    {"singularName", "event"},
                    {"namespaced", true},
                    {"kind", "Event"},
                    {"verbs", Json::array({"get", "list"})},
                    {"shortNames", Json::array({"ev"})}};
  return {{"kind", "APIResourceList"}, {"apiVersion", "v1"}, {"groupVersion", "v1"}, {"resources", Json::array({events})}};
}

Json version_info(const std::string& version) {
  return {{"major", "1"},
          {"minor", "32"},
          {"gitVersion", "v1.32.0-rubato." + version},
          {"platform", "linux/amd64"},
          {"version", version}};
}

}  // namespace rubato::control
