// SPDX-License-Identifier: Apache-2.0
// The pieces of a decoder in double precision, written from the papers and for whole sequences at once: no cache, no state, no
// chunks. The recurrent layer is in its dual form (Dao and Gu, "Transformers are SSMs", 2024: a masked product of C and B), which
// shares nothing with a recurrence but its meaning.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace rubato::engine::test {

using Row = std::vector<double>;
using Rows = std::vector<Row>;
using Tensors = std::map<std::string, std::vector<double>>;

inline double sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}
inline double silu(double x) {
  return x * sigmoid(x);
}
inline double softplus(double x) {
  return std::log1p(std::exp(x));
}

/// y = x W^T + b; W is (outputs, inputs), b may be empty.
inline Row product(const std::vector<double>& w, const Row& x, const std::vector<double>& b = {}) {
  Row y(w.size() / x.size());
  for (std::size_t o = 0; o < y.size(); ++o) {
    y[o] = b.empty() ? 0 : b[o];
    for (std::size_t i = 0; i < x.size(); ++i) y[o] += w[o * x.size() + i] * x[i];
  }
  return y;
}

/// Each so many columns for themselves.
inline Row normalised(const Row& x, const std::vector<double>& weight, double epsilon, std::size_t group) {
  Row y(x.size());
  for (std::size_t begin = 0; begin < x.size(); begin += group) {
    double squares = 0;
    for (std::size_t i = begin; i < begin + group; ++i) squares += x[i] * x[i];
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(group) + epsilon);
    for (std::size_t i = begin; i < begin + group; ++i) y[i] = x[i] * scale * weight[i];
  }
  return y;
}

inline Row part(const Row& x, std::size_t begin, std::size_t count) {
  return {x.begin() + static_cast<std::ptrdiff_t>(begin), x.begin() + static_cast<std::ptrdiff_t>(begin + count)};
}

/// A model's tensors under a prefix; an optional one that is absent is empty.
struct Scope {
  const Tensors& tensors;
  std::string prefix;
  [[nodiscard]] const std::vector<double>& operator[](const std::string& name) const { return tensors.at(prefix + name); }
  [[nodiscard]] std::vector<double> optional(const std::string& name) const {
    const auto found = tensors.find(prefix + name);
    return found == tensors.end() ? std::vector<double>{} : found->second;
  }
  [[nodiscard]] Row linear(const std::string& name, const Row& x) const {
    return product((*this)[name + ".weight"], x, optional(name + ".bias"));
  }
};

struct AttentionForm {
  std::size_t heads = 0;
  std::size_t kv_heads = 0;
  std::size_t head_size = 0;
  std::size_t turned = 0;  // the first elements of each head, 0: none
  double scale = 0;
  double theta = 10000.0;
  double epsilon = 1e-5;  // of norms of q and k
};

/// Rotates pairs (i, i + turned / 2) of each head by the position.
inline void rotate(Row& x, std::size_t position, const AttentionForm& form) {
  const std::size_t half = form.turned / 2;
  for (std::size_t head = 0; head < x.size(); head += form.head_size) {
    for (std::size_t i = 0; i < half; ++i) {
      const double angle =
          static_cast<double>(position) * std::pow(form.theta, -2.0 * static_cast<double>(i) / static_cast<double>(form.turned));
      const double a = x[head + i];
      const double b = x[head + half + i];
      x[head + i] = a * std::cos(angle) - b * std::sin(angle);
      x[head + half + i] = b * std::cos(angle) + a * std::sin(angle);
    }
  }
}

/// Each head by its own RMS, where the model has such weights.
inline Row head_normalised(const Row& x, const std::vector<double>& weight, double epsilon) {
  if (weight.empty()) return x;
  Row y;
  for (std::size_t head = 0; head < x.size(); head += weight.size()) {
    const Row one = normalised(part(x, head, weight.size()), weight, epsilon, weight.size());
    y.insert(y.end(), one.begin(), one.end());
  }
  return y;
}

inline Rows attend(const Rows& x, const AttentionForm& form, const Scope& weights) {
  Rows queries;
  Rows keys;
  Rows values;
  Rows out;
  for (std::size_t t = 0; t < x.size(); ++t) {
    queries.push_back(head_normalised(weights.linear("q_proj", x[t]), weights.optional("q_norm.weight"), form.epsilon));
    keys.push_back(head_normalised(weights.linear("k_proj", x[t]), weights.optional("k_norm.weight"), form.epsilon));
    values.push_back(weights.linear("v_proj", x[t]));
    rotate(queries[t], t, form);
    rotate(keys[t], t, form);
    Row mixed(form.heads * form.head_size);
    for (std::size_t head = 0; head < form.heads; ++head) {
      const std::size_t from = head / (form.heads / form.kv_heads) * form.head_size;
      Row weight(t + 1);
      double sum = 0;
      for (std::size_t s = 0; s <= t; ++s) {
        double score = 0;
        for (std::size_t i = 0; i < form.head_size; ++i) score += queries[t][head * form.head_size + i] * keys[s][from + i];
        weight[s] = std::exp(score * form.scale);
        sum += weight[s];
      }
      for (std::size_t s = 0; s <= t; ++s) {
        for (std::size_t i = 0; i < form.head_size; ++i) {
          mixed[head * form.head_size + i] += weight[s] / sum * values[s][from + i];
        }
      }
    }
    out.push_back(weights.linear("o_proj", mixed));
  }
  return out;
}

enum class Gating : std::uint8_t { GateThenNorm, NormThenGate, GateAlone };

struct RecurrentForm {
  std::size_t heads = 0;
  std::size_t head_size = 0;
  std::size_t groups = 0;
  std::size_t state_size = 0;
  std::size_t window = 0;
  double limit_low = 0;
  double limit_high = HUGE_VAL;
  double epsilon = 1e-5;
  Gating gating = Gating::GateThenNorm;
  [[nodiscard]] std::size_t inner() const { return heads * head_size; }
  [[nodiscard]] std::size_t channels() const { return inner() + 2 * groups * state_size; }
};

/// x | B | C after the convolution.
inline Rows convolved(const Rows& projected, const RecurrentForm& form, const Scope& weights) {
  const std::vector<double> bias = weights.optional("conv1d.bias");
  Rows out;
  for (std::size_t t = 0; t < projected.size(); ++t) {
    Row row(form.channels());
    for (std::size_t c = 0; c < row.size(); ++c) {
      double sum = bias.empty() ? 0 : bias[c];
      for (std::size_t back = 0; back < form.window && back <= t; ++back) {
        sum += weights["conv1d.weight"][(c + 1) * form.window - 1 - back] * projected[t - back][form.inner() + c];
      }
      row[c] = silu(sum);
    }
    out.push_back(row);
  }
  return out;
}

/// out[t] = sum over s <= t of (C[t] . B[s]) exp(A * (dt[s+1] + ... + dt[t])) dt[s] x[s] + D x[t], head by head.
inline Rows scanned(const Rows& mixed, const Rows& projected, const RecurrentForm& form, const Scope& weights) {
  Rows out(mixed.size(), Row(form.inner()));
  for (std::size_t head = 0; head < form.heads; ++head) {
    const double a = -std::exp(weights["A_log"][head]);
    const std::size_t b_at = form.inner() + head / (form.heads / form.groups) * form.state_size;
    const std::size_t c_at = b_at + form.groups * form.state_size;
    Row steps;
    for (const Row& row : projected) {
      const double step = softplus(row[form.inner() + form.channels() + head] + weights["dt_bias"][head]);
      steps.push_back(std::fmin(std::fmax(step, form.limit_low), form.limit_high));
    }
    for (std::size_t t = 0; t < mixed.size(); ++t) {
      double passed = 0;
      for (std::size_t back = 0; back <= t; ++back) {
        const std::size_t s = t - back;
        double match = 0;
        for (std::size_t n = 0; n < form.state_size; ++n) match += mixed[t][c_at + n] * mixed[s][b_at + n];
        const double weight = match * std::exp(a * passed) * steps[s];
        for (std::size_t p = 0; p < form.head_size; ++p) {
          out[t][head * form.head_size + p] += weight * mixed[s][head * form.head_size + p];
        }
        passed += steps[s];
      }
      for (std::size_t p = 0; p < form.head_size; ++p) {
        out[t][head * form.head_size + p] += weights["D"][head] * mixed[t][head * form.head_size + p];
      }
    }
  }
  return out;
}

inline Row gated(Row y, const Row& projected, const RecurrentForm& form, const Scope& weights) {
  const std::size_t group = form.inner() / form.groups;
  if (form.gating == Gating::NormThenGate) y = normalised(y, weights["norm.weight"], form.epsilon, group);
  for (std::size_t i = 0; i < y.size(); ++i) y[i] *= silu(projected[i]);
  if (form.gating == Gating::GateThenNorm) y = normalised(y, weights["norm.weight"], form.epsilon, group);
  return y;
}

inline Rows recur(const Rows& x, const RecurrentForm& form, const Scope& weights) {
  Rows projected;
  for (const Row& row : x) projected.push_back(weights.linear("in_proj", row));
  Rows y = scanned(convolved(projected, form, weights), projected, form, weights);
  for (std::size_t t = 0; t < y.size(); ++t) y[t] = weights.linear("out_proj", gated(y[t], projected[t], form, weights));
  return y;
}

/// gate and up are the halves of one row, or two rows.
inline Row gated_product(const Row& gate, const Row& up) {
  Row y(gate.size());
  for (std::size_t i = 0; i < y.size(); ++i) y[i] = silu(gate[i]) * up[i];
  return y;
}

}  // namespace rubato::engine::test
