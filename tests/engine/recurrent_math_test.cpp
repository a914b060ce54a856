// SPDX-License-Identifier: Apache-2.0
// The Mamba2 mixer in F64, written from "Transformers are SSMs" (Dao and Gu, 2024) and from none of the engine's code: the
// recurrence of its state-space model, and the same model as the semi-separable matrix of section 6, chunk by chunk. The two
// agree, and the engine's operations agree with them within F32 rounding.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/ops.h"
#include "tests/engine/recurrent_device.h"

namespace rubato::engine {
namespace {

using Reals = std::vector<double>;

/// A selective state-space model's inputs over time, for each head: a(t) in (0, 1), x(t) of head_size; for each group B(t), C(t).
struct Inputs {
  std::int64_t tokens = 0;
  std::int64_t heads = 0;
  std::int64_t head_size = 0;
  std::int64_t groups = 0;
  std::int64_t state_size = 0;
  Reals log_a{};  // (tokens, heads): A * dt
  Reals x{};      // (tokens, heads, head_size): times dt
  Reals b{};      // (tokens, groups, state_size)
  Reals c{};      // the same

  [[nodiscard]] double log_a_at(std::int64_t t, std::int64_t h) const { return log_a[static_cast<std::size_t>(t * heads + h)]; }
  [[nodiscard]] double x_at(std::int64_t t, std::int64_t h, std::int64_t p) const {
    return x[static_cast<std::size_t>((t * heads + h) * head_size + p)];
  }
  [[nodiscard]] const double* row(const Reals& values, std::int64_t t, std::int64_t h) const {
    const std::int64_t group = h * groups / heads;
    return values.data() + (t * groups + group) * state_size;
  }
  /// C(t) . B(s), for one head.
  [[nodiscard]] double score(std::int64_t t, std::int64_t s, std::int64_t h) const {
    double sum = 0;
    for (std::int64_t n = 0; n < state_size; ++n) sum += row(c, t, h)[n] * row(b, s, h)[n];
    return sum;
  }
};

/// h(t) = a(t) h(t-1) + B(t) x(t)^T, y(t) = C(t)^T h(t).
Reals recurrence(const Inputs& in) {
  Reals y(static_cast<std::size_t>(in.tokens * in.heads * in.head_size));
  for (std::int64_t h = 0; h < in.heads; ++h) {
    Reals state(static_cast<std::size_t>(in.head_size * in.state_size));
    for (std::int64_t t = 0; t < in.tokens; ++t) {
      for (std::int64_t p = 0; p < in.head_size; ++p) {
        double sum = 0;
        for (std::int64_t n = 0; n < in.state_size; ++n) {
          double& entry = state[static_cast<std::size_t>(p * in.state_size + n)];
          entry = std::exp(in.log_a_at(t, h)) * entry + in.row(in.b, t, h)[n] * in.x_at(t, h, p);
          sum += entry * in.row(in.c, t, h)[n];
        }
        y[static_cast<std::size_t>((t * in.heads + h) * in.head_size + p)] = sum;
      }
    }
  }
  return y;
}

/// Y = M X with M[t][s] = C(t)^T a(t) ... a(s+1) B(s), in blocks: within a chunk the masked product itself; between chunks its
/// factors, the state that each chunk adds, the decay that carries states on, and what a token reads from the state before its
/// chunk.
Reals chunked(const Inputs& in, std::int64_t chunk) {
  Reals y(static_cast<std::size_t>(in.tokens * in.heads * in.head_size));
  for (std::int64_t h = 0; h < in.heads; ++h) {
    Reals before(static_cast<std::size_t>(in.head_size * in.state_size));
    for (std::int64_t begin = 0; begin < in.tokens; begin += chunk) {
      const std::int64_t end = std::min(in.tokens, begin + chunk);
      Reals cumulated;  // of log a, from the chunk's first token on, each included
      for (std::int64_t t = begin; t < end; ++t) {
        cumulated.push_back((cumulated.empty() ? 0.0 : cumulated.back()) + in.log_a_at(t, h));
      }
      const auto decay = [&](std::int64_t to, std::int64_t from) {
        return std::exp(cumulated[static_cast<std::size_t>(to - begin)] - cumulated[static_cast<std::size_t>(from - begin)]);
      };
      for (std::int64_t t = begin; t < end; ++t) {
        Reals masked;  // one row of the chunk's part of M
        for (std::int64_t s = begin; s <= t; ++s) masked.push_back(in.score(t, s, h) * decay(t, s));
        for (std::int64_t p = 0; p < in.head_size; ++p) {
          double within = 0;
          for (std::int64_t s = begin; s <= t; ++s) within += masked[static_cast<std::size_t>(s - begin)] * in.x_at(s, h, p);
          double carried = 0;
          for (std::int64_t n = 0; n < in.state_size; ++n) {
            carried += in.row(in.c, t, h)[n] * before[static_cast<std::size_t>(p * in.state_size + n)];
          }
          y[static_cast<std::size_t>((t * in.heads + h) * in.head_size + p)] =
              within + std::exp(cumulated[static_cast<std::size_t>(t - begin)]) * carried;
        }
      }
      for (std::int64_t p = 0; p < in.head_size; ++p) {
        for (std::int64_t n = 0; n < in.state_size; ++n) {
          double added = 0;
          for (std::int64_t s = begin; s < end; ++s) added += decay(end - 1, s) * in.row(in.b, s, h)[n] * in.x_at(s, h, p);
          double& entry = before[static_cast<std::size_t>(p * in.state_size + n)];
          entry = std::exp(cumulated.back()) * entry + added;
        }
      }
    }
  }
  return y;
}

double sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

/// What stands around the state-space model in a mixer, for one sequence from its first token on.
struct Mixer {
  RecurrentCase one;
  LayerWeights weights{};
  Values norm_weight{};
  GatedNorm norm{};  // without its id
  Values projected{};
  std::int64_t tokens = 0;

  [[nodiscard]] double projected_at(std::int64_t t, std::int64_t column) const {
    return projected[static_cast<std::size_t>(t * one.shape.projected() + column)];
  }
  /// Channel by channel: the window's taps over this and the tokens before, the last tap on this one.
  [[nodiscard]] double convolved(std::int64_t t, std::int64_t channel) const {
    const RecurrentShape& shape = one.shape;
    double sum = one.taps_bias ? weights.taps_bias.values[static_cast<std::size_t>(channel)] : 0.0;
    for (std::int64_t back = 0; back < shape.window && back <= t; ++back) {
      sum +=
          static_cast<double>(weights.taps.values[static_cast<std::size_t>(channel * shape.window + shape.window - 1 - back)]) *
          projected_at(t - back, shape.inner() + channel);
    }
    return sum * sigmoid(sum);
  }
  [[nodiscard]] double time_step(std::int64_t t, std::int64_t h) const {
    const RecurrentShape& shape = one.shape;
    const double raw = projected_at(t, shape.inner() + shape.channels() + h) +
                       static_cast<double>(weights.time_step_bias.values[static_cast<std::size_t>(h)]);
    return std::clamp(std::log(1.0 + std::exp(raw)), static_cast<double>(shape.time_step_min),
                      static_cast<double>(shape.time_step_max));
  }
  [[nodiscard]] Inputs inputs() const {
    const RecurrentShape& shape = one.shape;
    Inputs in{.tokens = tokens,
              .heads = shape.heads,
              .head_size = shape.head_size,
              .groups = shape.groups,
              .state_size = shape.state_size};
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t h = 0; h < shape.heads; ++h) {
        in.log_a.push_back(-std::exp(static_cast<double>(weights.log_decay.values[static_cast<std::size_t>(h)])) *
                           time_step(t, h));
        for (std::int64_t p = 0; p < shape.head_size; ++p) {
          in.x.push_back(time_step(t, h) * convolved(t, h * shape.head_size + p));
        }
      }
      for (std::int64_t i = 0; i < shape.groups * shape.state_size; ++i) {
        in.b.push_back(convolved(t, shape.inner() + i));
        in.c.push_back(convolved(t, shape.inner() + shape.groups * shape.state_size + i));
      }
    }
    return in;
  }
  /// y of the state-space model, plus the skip.
  [[nodiscard]] Reals with_skip(Reals y) const {
    const std::int64_t inner = one.shape.inner();
    for (std::int64_t i = 0; i < tokens * inner; ++i) {
      const std::int64_t column = i % inner;
      y[static_cast<std::size_t>(i)] +=
          static_cast<double>(weights.skip.values[static_cast<std::size_t>(column / one.shape.head_size)]) *
          convolved(i / inner, column);
    }
    return y;
  }
  [[nodiscard]] Reals normed(Reals y) const {
    const std::int64_t inner = one.shape.inner();
    const auto gate = [&](std::int64_t t, std::int64_t column) {
      return projected_at(t, column) * sigmoid(projected_at(t, column));
    };
    for (std::int64_t t = 0; t < tokens; ++t) {
      double* row = y.data() + t * inner;
      if (norm.order != GatedNorm::Order::NormFirst) {
        for (std::int64_t i = 0; i < inner; ++i) row[i] *= gate(t, i);
      }
      if (norm.order == GatedNorm::Order::GateOnly) continue;
      for (std::int64_t first = 0; first < inner; first += norm.group_columns) {
        double squares = 0;
        for (std::int64_t i = first; i < first + norm.group_columns; ++i) squares += row[i] * row[i];
        const double root = std::sqrt(squares / norm.group_columns + static_cast<double>(norm.epsilon));
        for (std::int64_t i = first; i < first + norm.group_columns; ++i) {
          row[i] *= static_cast<double>(norm_weight[static_cast<std::size_t>(i)]) / root;
          if (norm.order == GatedNorm::Order::NormFirst) row[i] *= gate(t, i);
        }
      }
    }
    return y;
  }
};

Mixer draw_mixer(std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  Mixer mixer{.one = draw_case(generator(), 2)};
  mixer.tokens = 1 + static_cast<std::int64_t>(generator() % 70);
  mixer.weights = draw_weights(mixer.one.shape, weights_seed + 10);  // of the second layer
  mixer.norm_weight = draw(static_cast<std::size_t>(mixer.one.shape.inner()), seed + 1);
  constexpr GatedNorm::Order orders[]{GatedNorm::Order::GateFirst, GatedNorm::Order::NormFirst, GatedNorm::Order::GateOnly};
  mixer.norm = {
      .order = orders[seed % 3],
      .weight = {},
      .group_columns = generator() % 2 == 0 ? mixer.one.shape.inner() : mixer.one.shape.inner() / mixer.one.shape.groups,
      .epsilon = 1e-5F};
  mixer.projected = draw_projected(mixer.one.shape, static_cast<std::int32_t>(mixer.tokens), seed + 2);
  return mixer;
}

double largest(const Reals& values) {
  double most = 0;
  for (const double value : values) most = std::max(most, std::abs(value));
  return most;
}

Values narrowed(const Reals& values) {
  Values out;
  for (const double value : values) out.push_back(static_cast<float>(value));
  return out;
}

TEST(RecurrentMath, the_recurrence_and_the_semi_separable_matrix_are_the_same_model) {
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    const Mixer mixer = draw_mixer(seed);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + to_text(mixer.one));
    const Inputs in = mixer.inputs();
    const Reals one_by_one = recurrence(in);
    for (const std::int64_t chunk : {std::int64_t{1}, std::int64_t{8}, std::int64_t{33}, in.tokens}) {
      const Reals by_chunks = chunked(in, chunk);
      for (std::size_t i = 0; i < one_by_one.size(); ++i) {
        ASSERT_NEAR(by_chunks[i], one_by_one[i], 1e-10 * std::max(1.0, largest(one_by_one))) << "chunk " << chunk << " at " << i;
      }
    }
  }
}

/// convolve, scan and gated_norm one after another, the sequence cut in two.
std::pair<Values, Values> run_mixer(Device device, const Mixer& mixer) {
  device = with_layers(std::move(device), mixer.one);
  const RecurrentShape& shape = mixer.one.shape;
  const auto tokens = static_cast<std::int32_t>(mixer.tokens);
  const std::int32_t cut = tokens / 3;
  Values y;
  for (const auto& [begin, end] : {std::pair{0, cut}, std::pair{cut, tokens}}) {
    if (begin == end) continue;
    const StateUse use{.from = begin == 0 ? std::nullopt : std::optional(StateId{1}), .to = {1}, .save = {}};
    const Values part = recurrent_step(device, shape, {mixer.projected}, {{0, begin, end - begin, use}});
    y.insert(y.end(), part.begin(), part.end());
  }
  GatedNorm norm = mixer.norm;
  norm.weight = device.ops->make_norm(HostTensor{.shape = {shape.inner()}, .values = mixer.norm_weight}.view()).value();
  const Matrix in = device.matrix(tokens, shape.inner(), Format::Accumulator, y);
  const Matrix projected = device.matrix(tokens, shape.projected(), Format::Accumulator, mixer.projected);
  const Matrix out = device.matrix(tokens, shape.inner(), Format::Activation);
  device.ops->gated_norm(in, projected, norm, out);
  return {y, device.read(out)};
}

TEST(RecurrentMath, the_operations_compute_it_within_f32_rounding) {
  constexpr float rounding = 5e-6F;
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    const Mixer mixer = draw_mixer(seed);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + to_text(mixer.one));
    const Reals y = mixer.with_skip(recurrence(mixer.inputs()));
    const Reals normed = mixer.normed(y);
    const auto [scanned, gated] = run_mixer(reference_device(DataType::Float32), mixer);
    EXPECT_LT(relative_error(scanned, narrowed(y)), rounding) << "reference";
    EXPECT_LT(relative_error(gated, narrowed(normed)), rounding) << "reference";
    for (const Variant& variant : variants()) {
      const auto [on_cpu, gated_on_cpu] = run_mixer(cpu_device(variant, 2), mixer);
      EXPECT_LT(relative_error(on_cpu, narrowed(y)), rounding) << variant_name(variant);
      EXPECT_LT(relative_error(gated_on_cpu, narrowed(normed)), variant.dtype == DataType::BFloat16 ? 1.0F / 128.0F : rounding)
          << variant_name(variant);
    }
  }
}

}  // namespace
}  // namespace rubato::engine
