#include "common/weight_fetch.h"

#include <gtest/gtest.h>

#include <vector>

namespace poise {
namespace {

TEST(WeightFetch, BringsAWeightWhereAPieceOfItsLayerHoldsSomeOfIt) {
  ModelShape shape{};
  shape.num_hidden_layers = 2;
  shape.hidden_size = 64;
  shape.ffn_dim = 256;
  shape.num_attention_heads = shape.num_key_value_heads = 4;
  shape.head_dim = 16;
  shape.vocab_size = 100;
  shape.max_position_embeddings = 128;
  shape.word_embed_proj_dim = 64;
  const WeightLayout layout = weight_layout(shape, DType::float16, Bytes{3000});
  const WeightEntry& query = *layout.layer.find(Weight::w_q);
  ASSERT_GT(query.last_piece, query.piece);
  for (std::int32_t piece = 0; piece < std::ssize(layout.layer.pieces); ++piece) {
    const std::vector<messages::WeightFetch> one{{1, static_cast<std::uint32_t>(piece), 0}};
    EXPECT_EQ(fetches(one, layout, {1}, Weight::w_q),
              piece >= query.piece && piece <= query.last_piece);
    EXPECT_FALSE(fetches(one, layout, {0}, Weight::w_q)) << "of another layer";
    EXPECT_FALSE(fetches(one, layout, {1}, Weight::b_q)) << "the model has none";
  }
  EXPECT_FALSE(fetches({}, layout, {1}, Weight::w_q));
}

}  // namespace
}  // namespace poise
