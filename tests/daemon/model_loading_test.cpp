// SPDX-License-Identifier: Apache-2.0
// What start-up refuses because of memory, and whether the way out that it names is one.
#include "daemon/model_loading.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "manifests/units.h"
#include "policies/accounting.h"

namespace rubato {
namespace {

EngineSpec spec_of(const SyntheticModel& model) {
  EngineSpec spec;
  spec.devices = {"cpu"};
  spec.model.synthetic = model;
  spec.capacity = {.max_model_len = 4096, .max_num_seqs = 32, .kv_cache_memory = 1 << 20};
  return spec;
}

SyntheticModel model_of(Architecture architecture) {
  SyntheticModel model{.architecture = architecture, .hidden_size = 256, .layers = 4, .vocabulary = 300};
  if (architecture != Architecture::Mamba2) {
    model.heads = 4;
    model.kv_heads = 4;
    model.feed_forward = 128;
  }
  if (architecture == Architecture::Llama) return model;
  model.mamba_heads = 32;
  model.mamba_head_size = 64;
  model.state_size = 128;
  if (architecture == Architecture::Hybrid) model.attention_every = 2;
  return model;
}

TEST(ModelLoading, the_memory_that_a_refusal_asks_for_is_enough_and_one_mebibyte_less_is_not) {
  for (const Architecture architecture : {Architecture::Llama, Architecture::Mamba2, Architecture::Hybrid}) {
    for (const bool caching : {false, true}) {
      EngineSpec spec = spec_of(model_of(architecture));
      spec.prefix_caching.enabled = caching;
      const Result<ModelPlan> refused = plan_model(spec);
      ASSERT_FALSE(refused);
      EXPECT_EQ(refused.error().field, "spec.capacity.kvCacheMemory");
      const std::string& message = refused.error().message;
      const std::string before = "at least ";
      const std::size_t begin = message.find(before);
      ASSERT_NE(begin, std::string::npos) << message;
      const std::string asked = message.substr(begin + before.size(), message.find(" is needed") - begin - before.size());
      const Result<std::int64_t> bytes = parse_quantity(asked);
      ASSERT_TRUE(bytes) << message;
      spec.capacity.kv_cache_memory = *bytes;
      const Result<ModelPlan> plan = plan_model(spec);
      ASSERT_TRUE(plan) << message << "; then: " << plan.error().message;
      EXPECT_GE(plan->cache.block_count, policies::blocks_for_tokens(4096));
      spec.capacity.kv_cache_memory = *bytes - (1 << 20);
      EXPECT_FALSE(plan_model(spec)) << message;
    }
  }
}

}  // namespace
}  // namespace rubato
