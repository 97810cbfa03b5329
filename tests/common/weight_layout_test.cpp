#include "common/weight_layout.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "common/blocks.h"

namespace poise {
namespace {

ModelShape opt(std::int32_t layers, std::int32_t hidden, std::int32_t heads) {
  return {.num_hidden_layers = layers,
          .hidden_size = hidden,
          .ffn_dim = 4 * hidden,
          .num_attention_heads = heads,
          .num_key_value_heads = heads,
          .head_dim = hidden / heads,
          .vocab_size = 50272,
          .max_position_embeddings = 2048,
          .position_offset = 2,
          .word_embed_proj_dim = hidden,
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

void expect_sound(const Slab& slab) {
  std::uint64_t end = 0;
  std::uint64_t piece_end = 0;
  for (const WeightPiece& piece : slab.pieces) {
    EXPECT_EQ(piece.offset, piece_end);
    piece_end += static_cast<std::uint64_t>(piece.bytes.n);
  }
  EXPECT_LE(piece_end, static_cast<std::uint64_t>(slab.bytes.n));
  for (const WeightEntry& entry : slab.entries) {
    EXPECT_EQ(entry.offset % 256, 0u) << name_of(entry.weight);
    EXPECT_GE(entry.offset, end) << name_of(entry.weight);
    end = entry.offset + static_cast<std::uint64_t>(entry.bytes.n);
    const auto at = [&](std::int32_t piece) {
      return slab.pieces.at(static_cast<std::size_t>(piece));
    };
    EXPECT_GE(entry.offset, at(entry.piece).offset);
    EXPECT_LT(entry.offset,
              at(entry.piece).offset + static_cast<std::uint64_t>(at(entry.piece).bytes.n));
    EXPECT_GT(end, at(entry.last_piece).offset);
    EXPECT_LE(end, at(entry.last_piece).offset +
                       static_cast<std::uint64_t>(at(entry.last_piece).bytes.n));
    for (std::int32_t piece = entry.piece + 1; piece <= entry.last_piece; ++piece) {
      const auto row = static_cast<std::uint64_t>(entry.bytes.n / entry.rows);
      EXPECT_EQ((at(piece).offset - entry.offset) % (16 * row), 0u) << name_of(entry.weight);
    }
  }
  EXPECT_EQ(slab.bytes.n % 4096, 0);
}

TEST(WeightLayoutTest, WeightsAreAlignedDisjointAndInsideTheirPiece) {
  for (const std::int32_t hidden : {80, 96, 768, 7168}) {
    const WeightLayout layout = weight_layout(opt(4, hidden, hidden / 16), DType::float16);
    expect_sound(layout.outer);
    expect_sound(layout.layer);
  }
}

TEST(WeightLayoutTest, RegenerationAndKeysAndValuesOfNewRowsNeedTheFirstPieceAlone) {
  const WeightLayout layout = weight_layout(opt(4, 768, 12), DType::float16);
  EXPECT_EQ(layout.layer.find(Weight::w_kv)->piece, 0);
  EXPECT_EQ(layout.layer.find(Weight::b_kv)->piece, 0);
  EXPECT_EQ(layout.layer.find(Weight::w_kv)->rows, 2 * 768);
  EXPECT_EQ(layout.layer.find(Weight::attention_norm_weight)->piece, 0);
  EXPECT_EQ(layout.layer.find(Weight::attention_norm_bias)->piece, 0);
  EXPECT_EQ(layout.layer.find(Weight::w_q)->piece, 1);
}

TEST(WeightLayoutTest, LargeMatricesCrossInPiecesOfBoundedSize) {
  for (const auto& [layers, hidden] : {std::pair{32, 4096}, {48, 7168}, {64, 9216}, {96, 12288}}) {
    const Slab layer = weight_layout(opt(layers, hidden, hidden / 128), DType::float16).layer;
    expect_sound(layer);
    EXPECT_LE(layer.pieces.size(), static_cast<std::size_t>(kMaxWeightPieces));
    const std::int64_t most = std::max(kWeightPieceBytes.n, layer.bytes.n / 48 + 1);
    for (const WeightPiece& piece : layer.pieces) {
      EXPECT_LE(piece.bytes.n, most + (1 << 18)) << hidden;  // vectors stay behind their matrix
      EXPECT_GT(piece.bytes.n, 0);
    }
    EXPECT_LE(layer.pieces.size(), static_cast<std::size_t>(layer.bytes.n / most * 5 / 4 + 4));
    // W_K, W_V and the attention norm, and nothing else, come first.
    EXPECT_EQ(layer.find(Weight::attention_norm_bias)->last_piece + 1,
              layer.find(Weight::w_q)->piece);
  }
  const Slab tiny = weight_layout(opt(4, 96, 3), DType::float16, Bytes{4000}).layer;
  expect_sound(tiny);
  EXPECT_GT(tiny.pieces.size(), 30u);
}

TEST(WeightLayoutTest, TheSizeIsThatOfTheParametersAndLittleMore) {
  const ModelShape shape = opt(48, 7168, 56);  // OPT-30B
  const Bytes bytes = weight_layout(shape, DType::float16).total();
  const double parameters =
      48.0 * (12.0 * 7168 * 7168 + 13.0 * 7168) + 50272.0 * 7168 + 2050.0 * 7168 + 2.0 * 7168;
  EXPECT_NEAR(static_cast<double>(bytes.n), 2 * parameters, 2 * parameters * 1e-3);
}

TEST(WeightLayoutTest, WhatAModelLacksHasNoEntry) {
  ModelShape shape = opt(2, 96, 3);
  shape.qkv_bias = shape.output_bias = shape.mlp_bias = 0;
  shape.layer_norm_elementwise_affine = 0;
  const WeightLayout layout = weight_layout(shape, DType::float32);
  EXPECT_EQ(layout.layer.find(Weight::b_kv), nullptr);
  EXPECT_EQ(layout.layer.find(Weight::mlp_norm_weight), nullptr);
  EXPECT_EQ(layout.outer.find(Weight::final_norm_weight), nullptr);
  EXPECT_EQ(layout.outer.find(Weight::head), nullptr);
  EXPECT_EQ(layout.outer.find(Weight::project_in), nullptr);
}

TEST(WeightLayoutTest, AMatrixOfOneRowIsNoVector) {
  ModelShape shape = opt(1, 64, 1);
  shape.ffn_dim = shape.word_embed_proj_dim = 1;
  const WeightLayout layout = weight_layout(shape, DType::float16);
  for (const WeightEntry& entry : layout.layer.entries) {
    const std::string_view name = name_of(entry.weight);
    EXPECT_EQ(entry.matrix(), name.starts_with("w_") || name == "fc1" || name == "fc2") << name;
  }
  EXPECT_TRUE(layout.outer.find(Weight::project_out)->matrix());
  EXPECT_FALSE(layout.outer.find(Weight::final_norm_bias)->matrix());
}

TEST(WeightLayoutTest, TheHashTellsLayoutsApart) {
  const ModelShape shape = opt(2, 96, 3);
  ModelShape untied = shape;
  untied.tie_word_embeddings = 0;
  ModelShape deeper = shape;
  deeper.num_hidden_layers = 3;
  const std::uint64_t hash = weight_layout(shape, DType::float16).hash();
  EXPECT_NE(hash, weight_layout(shape, DType::float32).hash());
  EXPECT_NE(hash, weight_layout(untied, DType::float16).hash());
  EXPECT_NE(hash, weight_layout(deeper, DType::float16).hash());
}

TEST(WeightLayoutTest, TheHashTellsModelsApartWhoseWeightsLieAlike) {
  const ModelShape shape = opt(2, 96, 3);
  std::set<std::uint64_t> seen{weight_layout(shape, DType::float16).hash(),
                               weight_layout(shape, DType::bfloat16).hash()};
  EXPECT_EQ(seen.size(), 2u);
  const auto is_new = [&](auto change) {
    ModelShape other = shape;
    change(other);
    return seen.insert(weight_layout(other, DType::float16).hash()).second;
  };
  EXPECT_FALSE(is_new([](ModelShape&) {}));
  EXPECT_TRUE(is_new([](ModelShape& other) { other.activation_function = Activation::gelu; }));
  EXPECT_TRUE(is_new([](ModelShape& other) { other.norm_epsilon = 1e-6f; }));
  EXPECT_TRUE(is_new([](ModelShape& other) { other.do_layer_norm_before = 0; }));
  // Other heads of other widths, the same matrices.
  EXPECT_TRUE(is_new([](ModelShape& other) {
    other.num_attention_heads = other.num_key_value_heads = 6;
    other.head_dim = 16;
  }));
  // A row of positions more or fewer, used or not.
  EXPECT_TRUE(is_new([](ModelShape& other) {
    other.max_position_embeddings -= 1;
    other.position_offset += 1;
  }));
}

TEST(BlocksTest, AnActBlockOfAMultiHeadModelIsHalfAKvBlock) {
  const BlockSizes sizes = block_sizes(opt(2, 768, 12), DType::float16, KvFormat::plain);
  EXPECT_EQ(sizes.block(BlockKind::act) * 2, sizes.block(BlockKind::kv));
}

TEST(BlocksTest, WithGroupedQueriesAnActBlockMayBeTheLargerOne) {
  ModelShape shape = opt(2, 4096, 32);  // Llama-3-8B's proportions
  shape.num_key_value_heads = 8;
  const BlockSizes sizes = block_sizes(shape, DType::float16, KvFormat::plain);
  EXPECT_EQ(sizes.block(BlockKind::act), sizes.block(BlockKind::kv) * 2);
}

TEST(BlocksTest, AQuantisedKvRowIsCodesAndAScaleAndAnOffsetForEach64OfThem) {
  const auto row = [](std::int32_t heads, std::int32_t width, DType dtype, KvFormat format) {
    ModelShape shape = opt(2, 4096, 32);
    shape.num_key_value_heads = heads;
    shape.head_dim = width;
    return block_sizes(shape, dtype, format).kv_row.n;
  };
  EXPECT_EQ(row(32, 128, DType::float16, KvFormat::plain), 16384);
  EXPECT_EQ(row(32, 128, DType::float16, KvFormat::int8), 64 * (128 + 2 * 4));
  EXPECT_EQ(row(32, 128, DType::bfloat16, KvFormat::int4), 64 * (64 + 2 * 4));
  EXPECT_EQ(row(8, 64, DType::float32, KvFormat::int8), 16 * (64 + 8));
  EXPECT_EQ(row(3, 80, DType::float16, KvFormat::int8), 480 + 6 * 2 * 4);
  EXPECT_EQ(row(1, 65, DType::float16, KvFormat::int4), 80 + 16) << "66 bytes, then 16, padded";
  EXPECT_EQ(row(1, 1, DType::float16, KvFormat::int4), 16 + 16);
}

TEST(BlocksTest, TheTwoEndsOfARegionNeverMeet) {
  const BlockSizes sizes = block_sizes(opt(3, 96, 3), DType::float16, KvFormat::plain);
  PoolPartition pool{.region_bytes = 1 << 16, .act_blocks = 7, .kv_blocks = 0};
  while (pool.fits(sizes)) {
    ++pool.kv_blocks;
  }
  --pool.kv_blocks;
  ASSERT_TRUE(pool.fits(sizes));
  const LayerId layer{2};
  const std::uint64_t act_end = pool.offset(sizes, layer, BlockKind::act, {6}) +
                                static_cast<std::uint64_t>(sizes.block(BlockKind::act).n);
  EXPECT_LE(act_end, pool.offset(sizes, layer, BlockKind::kv, {pool.kv_blocks - 1}));
  EXPECT_EQ(pool.offset(sizes, layer, BlockKind::kv, {0}) +
                static_cast<std::uint64_t>(sizes.block(BlockKind::kv).n),
            3 * pool.region_bytes);
}

}  // namespace
}  // namespace poise
