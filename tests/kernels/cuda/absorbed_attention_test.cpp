// Absorbed attention on the GPU, held to float64 as the CPU's is, and its bits to themselves.
#include "tests/kernels/absorbed_case.h"
#include "tests/kernels/cuda/on_device.h"

namespace poise::test {
namespace {

class CudaAbsorbedAttention : public CudaTest {};
class CudaAbsorbedAttentionBits : public CudaTest {};

// Queries and outputs are of the stored type on a GPU.
AbsorbedCase case_of(const AbsorbedShape& shape, std::vector<std::int32_t> contexts) {
  return {shape, std::move(contexts), shape.dtype};
}

// `more_context`: than the longest that `max_context` says.
std::vector<float> run(const AbsorbedCase& one, Reads reads, std::uint32_t placement,
                       std::int32_t scratch_rows, std::uint32_t which = 1,
                       std::int32_t more_context = 0) {
  const AbsorbedCase::Layout layout = one.lay_out(reads, placement, which);
  const StoredOnDevice buffers[3] = {StoredOnDevice(layout.buffers[0]),
                                     StoredOnDevice(layout.buffers[1]),
                                     StoredOnDevice(layout.buffers[2])};
  const StoredOnDevice act(layout.act), weight(one.weight()), bias(one.bias());
  const DType dtype = one.shape().dtype;
  const StoredOnDevice q(Stored(dtype, one.q()));
  const StoredOnDevice out(Stored(dtype, std::vector<float>(one.q().size(), AbsorbedCase::kNan)));
  const OnDevice<ContextBlock> table(layout.table);
  const OnDevice<AttentionSequence> sequences(layout.sequences);
  Attention attention = one.attention();
  attention.max_context += more_context;
  attention.out = out.get();
  attention.q = q.get();
  for (int i = 0; i < 3; ++i) {
    attention.slots[i] = buffers[i].get();
  }
  attention.blocks = table.get();
  attention.sequences = sequences.get();
  const OnDevice<float> scratch(std::vector<float>(
      one.scratch_floats(scratch_rows, attention.max_context), AbsorbedCase::kNan));
  cuda::absorbed_attention({.attention = attention,
                            .act = act.get(),
                            .w_kv = {weight.get(), one.weight_rows(), one.shape().hidden, dtype},
                            .b_kv = one.shape().bias ? bias.get() : nullptr,
                            .scratch = scratch.get(),
                            .scratch_rows = scratch_rows},
                           nullptr);
  return floats_of(out.read());
}

// Weights rounded to the stored type, of values |v| < 6, and the output's own rounding, as in attention of keys; nothing
// else is rounded to it.
double allowed(DType dtype) { return dtype == DType::float32 ? 0 : 12 * rounding(dtype); }

// Sizes that tensor cores take, with and without whole tiles of heads, columns and inputs; then those that they do not.
constexpr AbsorbedShape kAbsorbedShapes[] = {
    {3, 3, 8, 24},    {2, 2, 32, 64},  {13, 13, 16, 208}, {40, 40, 8, 320}, {4, 4, 64, 256},
    {2, 2, 80, 160},  {1, 1, 256, 72}, {6, 2, 16, 40},    {70, 35, 8, 136}, {2, 2, 128, 1104},
    {33, 33, 24, 64}, {1, 1, 1, 1},    {3, 3, 20, 60},    {1, 1, 250, 48},  {2, 2, 20, 1100},
    {6, 3, 8, 41},    {5, 5, 33, 165}};

TEST_F(CudaAbsorbedAttention, IsAttentionOverKeysAndValuesThatAreNeverMade) {
  for (const AbsorbedShape& heads : kAbsorbedShapes) {
    for (const DType dtype : kAllTypes) {
      for (const bool bias : {true, false}) {
        SCOPED_TRACE(testing::Message()
                     << heads.heads << " heads on " << heads.kv_heads << " of " << heads.dim << ", "
                     << heads.hidden << ", " << name_of(dtype) << (bias ? "" : ", no bias"));
        AbsorbedShape shape = heads;
        shape.dtype = dtype;
        shape.bias = bias;
        const AbsorbedCase one = case_of(shape, {0, 15, 16, 40, 63, 64, 100});
        for (const Reads reads : {Reads::mixed, Reads::activations, Reads::keys}) {
          one.expect_right(run(one, reads, 3, 2), reads, 1, allowed(dtype));
        }
      }
    }
  }
}

TEST_F(CudaAbsorbedAttention, TakesALongContext) {
  for (const DType dtype : kAllTypes) {
    for (const std::int32_t context : {127, 128, 500, 2047, 8191, 8192, 9000}) {
      SCOPED_TRACE(testing::Message() << context << " of " << name_of(dtype));
      const AbsorbedCase one = case_of({2, 2, 16, 32, dtype}, {context});
      for (std::uint32_t which = 0; which < 4; ++which) {
        one.expect_right(run(one, Reads::mixed, which, 1, which), Reads::mixed, which,
                         allowed(dtype));
      }
      one.expect_right(run(one, Reads::activations, 5, 1), Reads::activations, 1, allowed(dtype));
    }
  }
}

TEST_F(CudaAbsorbedAttention, TakesMoreRowsThanATile) {
  std::vector<std::int32_t> contexts(75);
  for (std::size_t i = 0; i < contexts.size(); ++i) {
    contexts[i] = static_cast<std::int32_t>(i * 7 % 90);
  }
  for (const DType dtype : kAllTypes) {
    const AbsorbedCase one = case_of({5, 5, 32, 160, dtype}, contexts);
    one.expect_right(run(one, Reads::mixed, 1, 75), Reads::mixed, 1, allowed(dtype));
  }
}

// The same bits in any slots, in any order, beside any other sequences, with any room.
TEST_F(CudaAbsorbedAttentionBits, DependOnWhichBlocksAreAbsorbedAlone) {
  for (const AbsorbedShape& shape :
       {AbsorbedShape{4, 4, 64, 256, DType::bfloat16}, AbsorbedShape{14, 14, 20, 280},
        AbsorbedShape{40, 40, 16, 640, DType::float16},
        AbsorbedShape{6, 3, 10, 1030, DType::float16}}) {
    const AbsorbedCase one = case_of(shape, {0, 15, 16, 140, 33, 500});
    const std::vector<float> expected = run(one, Reads::mixed, 1, 6);
    std::uint32_t placement = 2;
    for (const std::int32_t room : {1, 2, 6, 64}) {
      EXPECT_TRUE(same_bits(run(one, Reads::mixed, placement++, room), expected));
      EXPECT_TRUE(same_bits(run(one, Reads::mixed, placement++, room, 1, 1000), expected));
    }
    EXPECT_FALSE(same_bits(run(one, Reads::activations, 1, 6), expected));
  }
}

}  // namespace
}  // namespace poise::test
