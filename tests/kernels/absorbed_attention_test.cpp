#include <gtest/gtest.h>

#include "tests/kernels/absorbed_case.h"

namespace poise::test {
namespace {

// What the operation leaves in `out`. Without room for a row, Attention runs instead.
std::vector<float> run(const AbsorbedCase& one, Reads reads, std::uint32_t placement,
                       std::int32_t scratch_rows, cpu::Workers& workers, std::uint32_t which = 1) {
  const AbsorbedCase::Layout layout = one.lay_out(reads, placement, which);
  const PackedWeight weight(one.weight(), one.weight_rows(), one.shape().hidden);
  std::vector<float> out(one.q().size(), AbsorbedCase::kNan);
  Attention attention = one.attention();
  attention.out = out.data();
  attention.q = one.q().data();
  for (int i = 0; i < 3; ++i) {
    attention.slots[i] = layout.buffers[i].data();
  }
  attention.blocks = layout.table.data();
  attention.sequences = layout.sequences.data();
  if (scratch_rows == 0) {
    cpu::attention(attention, workers);
    return out;
  }
  std::vector<float> scratch(one.scratch_floats(scratch_rows, attention.max_context),
                             AbsorbedCase::kNan);
  cpu::absorbed_attention({.attention = attention,
                           .act = layout.act.data(),
                           .w_kv = weight.matrix(),
                           .b_kv = one.shape().bias ? one.bias().data() : nullptr,
                           .scratch = scratch.data(),
                           .scratch_rows = scratch_rows},
                          workers);
  return out;
}

TEST(AbsorbedAttention, IsAttentionOverKeysAndValuesThatAreNeverMade) {
  cpu::Workers workers(2);
  for (const AbsorbedShape& heads :
       {AbsorbedShape{3, 3, 8, 24}, AbsorbedShape{2, 2, 32, 64}, AbsorbedShape{1, 1, 1, 1},
        AbsorbedShape{13, 13, 16, 208}, AbsorbedShape{3, 3, 20, 60}, AbsorbedShape{1, 1, 250, 48},
        AbsorbedShape{2, 2, 20, 1100}, AbsorbedShape{6, 2, 16, 40}}) {
    for (const DType dtype : kAllTypes) {
      for (const bool bias : {true, false}) {
        SCOPED_TRACE(testing::Message() << heads.heads << " heads of " << heads.dim << ", "
                                        << name_of(dtype) << (bias ? "" : ", no bias"));
        AbsorbedShape shape = heads;
        shape.dtype = dtype;
        shape.bias = bias;
        const AbsorbedCase one(shape, {0, 15, 16, 40});
        for (const Reads reads : {Reads::mixed, Reads::activations, Reads::keys}) {
          one.expect_right(run(one, reads, 3, 2, workers), reads);
        }
      }
    }
  }
}

TEST(AbsorbedAttention, TakesALongContextChunkByChunk) {
  cpu::Workers workers(2);
  for (const std::int32_t context : {127, 128, 129, 500}) {
    const AbsorbedCase one({2, 2, 64, 128, DType::float16}, {context});
    for (std::uint32_t which = 0; which < 4; ++which) {
      one.expect_right(run(one, Reads::mixed, which, 1, workers, which), Reads::mixed, which);
    }
  }
}

TEST(AbsorbedAttentionBits, AreThoseOfAttentionWhereEveryBlockHoldsKeys) {
  cpu::Workers workers(2);
  std::vector<AbsorbedShape> shapes{{3, 3, 20, 60}, {1, 1, 250, 48}, {6, 2, 16, 40}};  // attention transposes keys of odd widths
  for (const DType dtype : kAllTypes) {
    shapes.push_back({3, 3, 32, 96, dtype});
  }
  for (const AbsorbedShape& shape : shapes) {
    const AbsorbedCase one(shape, {0, 15, 140, 300});
    for (const cpu::Isa isa : cpu::available_isas()) {
      under(isa, [&] {
        EXPECT_TRUE(same_bits(run(one, Reads::keys, 2, 3, workers), run(one, Reads::keys, 1, 0, workers)))
            << cpu::name_of(isa) << ", " << shape.dim;
      });
    }
  }
}

// The same bits in any slots, beside any other sequences, with any room, threads and instruction set.
TEST(AbsorbedAttentionBits, DependOnWhichBlocksAreAbsorbedAlone) {
  for (const AbsorbedShape& shape :
       {AbsorbedShape{4, 4, 64, 256, DType::bfloat16}, AbsorbedShape{14, 14, 20, 280},
        AbsorbedShape{6, 3, 16, 1048, DType::float16}}) {
    const AbsorbedCase one(shape, {0, 15, 16, 140, 33});
    cpu::Workers alone(1);
    const std::vector<float> expected = run(one, Reads::mixed, 1, 5, alone);
    std::uint32_t placement = 2;
    for (const int threads : {1, 2, 3}) {
      cpu::Workers workers(threads);
      for (const std::int32_t room : {1, 2, 64}) {
        EXPECT_TRUE(same_bits(run(one, Reads::mixed, placement++, room, workers), expected));
      }
      for (const cpu::Isa isa : cpu::available_isas()) {
        under(isa, [&] {
          EXPECT_TRUE(same_bits(run(one, Reads::mixed, placement++, 5, workers), expected))
              << cpu::name_of(isa);
        });
      }
    }
    EXPECT_FALSE(same_bits(run(one, Reads::activations, 1, 5, alone), expected));
  }
}

}  // namespace
}  // namespace poise::test
