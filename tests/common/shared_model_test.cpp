#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "common/shared_memory.h"
#include "common/trouble.h"
#include "tests/support/small_shape.h"

namespace poise {
namespace {

using testing::HasSubstr;

// As a loader leaves it when it begins to load.
class SharedModelTest : public testing::Test {
 protected:
  SharedModelTest() {
    control_.shape = testing_support::small_shape(3);
    control_.dtype = DType::float16;
    const WeightLayout layout = weight_layout(control_.shape, control_.dtype);
    control_.layout_hash = layout.hash();
    control_.weights_bytes = static_cast<std::uint64_t>(layout.total().n);
  }
  std::string refusal() const {
    try {
      model_in(control_);
    } catch (const Failure& failure) {
      EXPECT_EQ(failure.code(), Exit::foreign);
      return failure.what();
    }
    return {};
  }

  ControlSegment control_{};
};

TEST_F(SharedModelTest, WhatALoaderWroteIsAModel) {
  EXPECT_EQ(refusal(), "");
  control_.released_layers = 3;
  EXPECT_EQ(refusal(), "");
}

// Without bounds, the layout of such shapes overflows (tests/fuzz/control_fuzz.cpp).
TEST_F(SharedModelTest, ShapesThatNoConfigurationGivesAreRefusedBeforeTheyAreMultiplied) {
  const std::function<void(ModelShape&)> spoils[] = {
      [](auto& shape) { shape.num_hidden_layers = 0; },
      [](auto& shape) { shape.num_hidden_layers = 1025; },
      [](auto& shape) { shape.num_hidden_layers = -1; },
      [](auto& shape) { shape.hidden_size = 0; },
      [](auto& shape) { shape.hidden_size = 65537; },
      [](auto& shape) { shape.ffn_dim = INT32_MAX; },
      [](auto& shape) { shape.num_attention_heads = shape.num_key_value_heads = INT32_MAX; },
      [](auto& shape) { shape.num_key_value_heads = 3; },
      [](auto& shape) { shape.head_dim = INT32_MAX; },
      [](auto& shape) { shape.vocab_size = INT32_MAX; },
      [](auto& shape) { shape.max_position_embeddings = INT32_MAX; },
      [](auto& shape) { shape.position_offset = INT32_MAX; },
      [](auto& shape) { shape.position_offset = -1; },
      [](auto& shape) { shape.word_embed_proj_dim = 0; },
      [](auto& shape) { shape.activation_function = static_cast<Activation>(4); },
      [](auto& shape) { shape.tie_word_embeddings = 2; },
      [](auto& shape) { shape.rotary.dim = 17; },
      [](auto& shape) { shape.sliding_window = -1; },
  };
  const ModelShape sound = control_.shape;
  for (const auto& spoil : spoils) {
    control_.shape = sound;
    spoil(control_.shape);
    EXPECT_THAT(refusal(), HasSubstr("impossible sizes")) << "case " << &spoil - spoils;
  }
  control_.shape = sound;
  control_.dtype = static_cast<DType>(3);
  EXPECT_THAT(refusal(), HasSubstr("impossible sizes"));
}

TEST_F(SharedModelTest, OnlyAModelOfBfloat16HasBfloat12AndInItsOneForm) {
  control_.shape.packed = kBfloat12;
  control_.shape.packed_weights = packable_weights(control_.shape);
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    control_.dtype = dtype;
    EXPECT_EQ(refusal().find("impossible sizes") == std::string::npos, dtype == DType::bfloat16);
  }
  control_.shape.packed.group = 64;
  EXPECT_THAT(refusal(), HasSubstr("impossible sizes"));
}

TEST_F(SharedModelTest, ALayoutOfAnotherBuildIsRefused) {
  ++control_.layout_hash;
  EXPECT_THAT(refusal(), HasSubstr("another build lays them out"));
}

TEST_F(SharedModelTest, SizesThatContradictTheLayoutAreRefused) {
  ++control_.weights_bytes;
  EXPECT_THAT(refusal(), HasSubstr("bytes of weights"));
  --control_.weights_bytes;
  control_.released_layers = 4;
  EXPECT_THAT(refusal(), HasSubstr("4 released layers"));
}

}  // namespace
}  // namespace poise
