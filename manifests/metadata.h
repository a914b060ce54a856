// SPDX-License-Identifier: Apache-2.0
// Kubernetes' rules for names, labels and annotations, so that an object accepted here is accepted by a cluster as well.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "manifests/field_error.h"

namespace rubato {

void check_name(std::string_view name, std::string_view field, FieldErrors& errors);
void check_labels(const std::map<std::string, std::string>& labels, std::string_view field, FieldErrors& errors);
void check_annotations(const std::map<std::string, std::string>& annotations, std::string_view field, FieldErrors& errors);

}  // namespace rubato
