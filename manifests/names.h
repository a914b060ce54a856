// SPDX-License-Identifier: Apache-2.0
// The names of every enumeration that people write or read: in manifests, over the API, in metrics and in the journal. One
// line per value, with the help text that the schema shows.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "manifests/engine_spec.h"
#include "manifests/settings.h"

namespace rubato {

template <class Enum>
struct Named {
  Enum value;
  std::string_view name;
  std::string_view help;
};

/// All values of an enumeration in the order of their declaration: `for (const auto& named : enum_names<Mode>)`.
template <class Enum>
inline constexpr std::array<Named<Enum>, 0> enum_names{};

template <>
inline constexpr std::array enum_names<PriorityPolicy>{
    Named{PriorityPolicy::Deadline, "Deadline", "the largest chunk that lets no running decode miss its ITL target"},
    Named{PriorityPolicy::DecodeFirst, "DecodeFirst", "every decode first, prefills in order of arrival with what is left"},
    Named{PriorityPolicy::PrefillFirst, "PrefillFirst", "prefills first, decodes within a bounded gap"},
    Named{PriorityPolicy::ShortestFirst, "ShortestFirst", "every decode first, then the prefill with the least work left"},
};

template <>
inline constexpr std::array enum_names<Mode>{
    Named{Mode::Chunked, "Chunked", "every lane mixes decodes and chunks of prefills in one step"},
    Named{Mode::Disaggregated, "Disaggregated", "prefill lanes and decode lanes"},
};

template <>
inline constexpr std::array enum_names<Reservation>{
    Named{Reservation::LastChunk, "LastChunk", "when at most one chunk of the prompt is left"},
    Named{Reservation::PrefillComplete, "PrefillComplete", "once the whole prompt is computed"},
    Named{Reservation::Early, "Early", "when the prefill is admitted"},
};

template <>
inline constexpr std::array enum_names<Exactness>{
    Named{Exactness::Trust, "Trust", "what the tests have shown holds here too"},
    Named{Exactness::Verify, "Verify", "the exactness checker runs on this machine, device and model at start"},
};

// Not Off and On: many readers of YAML take these for booleans.
template <>
inline constexpr std::array enum_names<Lockstep>{
    Named{Lockstep::Off, "None", "each lane steps for itself"},
    Named{Lockstep::On, "EveryStep", "every step waits for the slowest lane, as models need whose layers synchronise all ranks"},
    Named{Lockstep::Aligned, "Aligned", "as EveryStep, and prefill chunks are dealt to all lanes in the same step"},
};

template <>
inline constexpr std::array enum_names<DataType>{
    Named{DataType::Float32, "Float32", "IEEE single precision"},
    Named{DataType::BFloat16, "BFloat16", "8 bits of exponent, 7 of fraction"},
    Named{DataType::Float16, "Float16", "IEEE half precision"},
};

template <>
inline constexpr std::array enum_names<Architecture>{
    Named{Architecture::Llama, "Llama", "RMSNorm, rotary positions, grouped-query attention, SwiGLU"},
    Named{Architecture::Mamba2, "Mamba2", "recurrent layers alone"},
    Named{Architecture::Hybrid, "Hybrid", "attention or a recurrent layer, then SwiGLU, in every layer"},
};

template <class Enum>
concept NamedEnum = (enum_names<Enum>.size() > 0);

/// The name as written in a manifest. A value outside the enumeration is our own bug.
template <NamedEnum Enum>
[[nodiscard]] constexpr std::string_view to_string(Enum value) {
  for (const auto& named : enum_names<Enum>) {
    if (named.value == value) return named.name;
  }
  CHECK(false, "no such value: ", static_cast<int>(value));
}

/// Exact match only: `deadline` is not `Deadline`.
template <NamedEnum Enum>
[[nodiscard]] constexpr std::optional<Enum> from_string(std::string_view text) {
  for (const auto& named : enum_names<Enum>) {
    if (named.name == text) return named.value;
  }
  return std::nullopt;
}

/// `Deadline, DecodeFirst, ...` for messages that say what is allowed.
template <NamedEnum Enum>
[[nodiscard]] std::string allowed_names() {
  std::string text;
  for (const auto& named : enum_names<Enum>) {
    if (!text.empty()) text += ", ";
    text += named.name;
  }
  return text;
}

}  // namespace rubato
