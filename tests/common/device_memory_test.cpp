#include "common/device_memory.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "common/trouble.h"

namespace poise {
namespace {

ModelShape opt_125m() {
  return {.num_hidden_layers = 12,
          .hidden_size = 768,
          .ffn_dim = 3072,
          .num_attention_heads = 12,
          .num_key_value_heads = 12,
          .head_dim = 64,
          .vocab_size = 50272,
          .max_position_embeddings = 2048,
          .position_offset = 2,
          .word_embed_proj_dim = 768,
          .activation_function = Activation::relu,
          .norm_epsilon = 1e-5f,
          .do_layer_norm_before = 1,
          .qkv_bias = 1,
          .output_bias = 1,
          .mlp_bias = 1,
          .layer_norm_elementwise_affine = 1,
          .has_final_layer_norm = 1,
          .tie_word_embeddings = 1,
          .learned_positions = 1};
}

DeviceLimits some_limits() {
  return {.resident_layers = 3,
          .max_rows = 64,
          .max_mini_batch_rows = 32,
          .max_sequences = 8,
          .act_slots = 10,
          .kv_slots = 20,
          .logits_rows = 8,
          .max_context = 2048};
}

TEST(DeviceMemory, TheTotalIsTheSumOfTheLines) {
  const auto plan = plan_device_memory(opt_125m(), DType::float16, some_limits(), {123});
  const Bytes sum = std::accumulate(plan.lines.begin(), plan.lines.end(), Bytes{},
                                    [](Bytes a, const auto& line) { return a + line.bytes; });
  EXPECT_EQ(plan.total, sum);
  EXPECT_EQ(plan.lines.back().bytes, Bytes{123});
}

TEST(DeviceMemory, BlockBuffersAreCountedByTheirBlocks) {
  const DeviceSizes sizes = device_sizes(opt_125m(), DType::float16, some_limits());
  EXPECT_EQ(sizes.act_buffer.n, 10 * 16 * 768 * 2);
  EXPECT_EQ(sizes.kv_buffer.n, 20 * 16 * 2 * 768 * 2);
  EXPECT_EQ(sizes.regenerated.n, 10 * 16 * 2 * 768 * 2);
  EXPECT_EQ(sizes.hidden.n, 64 * 768 * 4);
  EXPECT_EQ(sizes.logits.n, 8 * 50272 * 4);
}

TEST(DeviceMemory, QuantisedKvBlocksAreSmallerAndNeedRoomForPlainRows) {
  DeviceLimits limits = some_limits();
  const DeviceSizes plain = device_sizes(opt_125m(), DType::float16, limits);
  EXPECT_EQ(plain.plain_kv.n, 0);
  limits.kv_format = KvFormat::int4;
  const DeviceSizes sizes = device_sizes(opt_125m(), DType::float16, limits);
  constexpr std::int64_t kRow = 24 * (32 + 4);  // heads of K and V, 64 wide
  EXPECT_EQ(sizes.kv_buffer.n, 20 * 16 * kRow);
  EXPECT_EQ(sizes.regenerated.n, 10 * 16 * kRow);
  EXPECT_EQ(sizes.act_buffer, plain.act_buffer);
  EXPECT_EQ(sizes.plain_kv.n, limits.max_mini_batch_rows * 2 * 768 * 2);
  limits.max_mini_batch_rows = 3;  // KV Gen makes a block at a time
  EXPECT_EQ(device_sizes(opt_125m(), DType::float16, limits).plain_kv.n, 16 * 2 * 768 * 2);
}

TEST(DeviceMemory, ASlabOfWholePanelsIsAsLargeAsItsPieces) {
  const Slab layer = weight_layout(opt_125m(), DType::float16).layer;
  const DeviceSlab slab = device_slab(layer, DType::float16);
  for (std::size_t i = 0; i < layer.entries.size(); ++i) {
    EXPECT_EQ(slab.offsets[i], layer.entries[i].offset) << name_of(layer.entries[i].weight);
  }
  EXPECT_LE(slab.bytes, layer.bytes);
}

TEST(DeviceMemory, AnOddMatrixIsPaddedToWholePanelsAndAPositionTableIsNot) {
  ModelShape shape = opt_125m();
  shape.vocab_size = 1001;
  const Slab outer = weight_layout(shape, DType::float32).outer;
  const DeviceSlab slab = device_slab(outer, DType::float32);
  ASSERT_EQ(outer.entries[0].weight, Weight::token_embedding);
  ASSERT_EQ(outer.entries[1].weight, Weight::position_embedding);
  EXPECT_EQ(slab.offsets[1], 1008u * 768 * 4);
  EXPECT_EQ(slab.offsets[2] - slab.offsets[1], 2050u * 768 * 4);
}

TEST(DeviceMemory, ResidentLayersAreAsManyAsSaidAndSpreadEvenly) {
  for (std::int32_t layers = 1; layers <= 40; ++layers) {
    for (std::int32_t resident = 0; resident <= layers; ++resident) {
      SCOPED_TRACE(testing::Message() << resident << " of " << layers);
      DeviceLimits limits = some_limits();
      limits.resident_layers = resident;
      std::int32_t count = 0;
      for (std::int32_t layer = 0; layer < layers; ++layer) {
        count += is_resident(limits, {static_cast<std::uint32_t>(layer)}, layers) ? 1 : 0;
        const double even = static_cast<double>(layer + 1) * resident / layers;
        EXPECT_GE(count, even);
        EXPECT_LT(count, even + 1);
      }
      EXPECT_EQ(count, resident);
    }
  }
}

// Of eight rows, with scores of the longest context.
TEST(DeviceMemory, AbsorbedRowsHaveRoomForTheLongestContext) {
  DeviceLimits limits = some_limits();
  limits.max_mini_batch_rows = 8;
  EXPECT_EQ(device_sizes(opt_125m(), DType::float16, limits).mlp.n, 8 * 3072 * 4);
  limits.absorption = true;
  EXPECT_EQ(device_sizes(opt_125m(), DType::float16, limits).mlp.n,
            8 * 12 * (768 + 16 + 64 + 2048) * 4);
}

TEST(DeviceMemory, AsManyLayersAreResidentAsFitAndNotOneMore) {
  const std::uint64_t seed = 20261121;
  std::mt19937_64 random(seed);
  const ModelShape shape = opt_125m();
  const Bytes least = plan_device_memory(shape, DType::float16,
                                         {.resident_layers = 0,
                                          .max_rows = 64,
                                          .max_mini_batch_rows = 32,
                                          .max_sequences = 8,
                                          .act_slots = 10,
                                          .kv_slots = 20,
                                          .logits_rows = 8,
                                          .max_context = 64},
                                         {0})
                          .total;
  for (int round = 0; round < 200; ++round) {
    const Bytes cap = least + Bytes{static_cast<std::int64_t>(random() % 300'000'000)};
    const DeviceLimits limits =
        with_resident_layers(shape, DType::float16, some_limits(), {1000}, cap + Bytes{1000});
    EXPECT_LE(plan_device_memory(shape, DType::float16, limits, {1000}).total, cap + Bytes{1000})
        << "seed " << seed;
    for (std::int32_t more = limits.resident_layers + 1; more <= shape.num_hidden_layers; ++more) {
      DeviceLimits larger = limits;
      larger.resident_layers = more;
      EXPECT_GT(plan_device_memory(shape, DType::float16, larger, {1000}).total, cap + Bytes{1000})
          << "seed " << seed << " cap " << cap.n;
    }
  }
}

TEST(DeviceMemory, AModelWithAllLayersResidentHasNoLayerLedger) {
  DeviceLimits limits = some_limits();
  limits.resident_layers = 12;
  for (const auto& line : plan_device_memory(opt_125m(), DType::float16, limits, {0}).lines) {
    EXPECT_NE(line.name, "streamed weights");
  }
}

TEST(DeviceMemory, WhatDoesNotFitIsRefusedWithTheTable) {
  try {
    with_resident_layers(opt_125m(), DType::float16, some_limits(), {0}, kMiB);
    FAIL() << "a MiB held a model";
  } catch (const Failure& failure) {
    const std::string sentence = failure.what();
    EXPECT_NE(sentence.find("1.0 MiB are allowed"), std::string::npos) << sentence;
    EXPECT_NE(sentence.find("KV buffers"), std::string::npos) << sentence;
  }
}

TEST(DeviceMemory, LimitsThatAreNoBuffersAreRefusedByName) {
  const auto refused = [](auto change) {
    DeviceLimits limits = some_limits();
    change(limits);
    EXPECT_THROW(plan_device_memory(opt_125m(), DType::float16, limits, {0}), Failure);
  };
  refused([](DeviceLimits& l) { l.resident_layers = 13; });
  refused([](DeviceLimits& l) { l.resident_layers = -1; });
  refused([](DeviceLimits& l) { l.max_rows = 0; });
  refused([](DeviceLimits& l) { l.max_mini_batch_rows = (1 << 24) + 1; });
  refused([](DeviceLimits& l) { l.max_sequences = -5; });
  refused([](DeviceLimits& l) { l.act_slots = -1; });
  refused([](DeviceLimits& l) { l.logits_rows = 0x7fffffff; });
  refused([](DeviceLimits& l) { l.max_context = 0; });
  refused([](DeviceLimits& l) { l.act_slots = l.kv_slots = 0; });
}

}  // namespace
}  // namespace poise
