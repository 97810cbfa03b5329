// Packed matrices on a GPU: the bits of the CPU's numbers.
#include "tests/kernels/cuda/on_device.h"
#include "tests/kernels/packed_operands.h"

namespace poise::test {
namespace {

class CudaUnpack : public CudaTest {};

TEST_F(CudaUnpack, GivesTheCpusNumbersBitForBit) {
  for (const PackedCase& c : packed_cases()) {
    const PackedOperand operand(c);
    const DeviceBytes panels(operand.panels.data(), operand.panels.size());
    const OnDevice<std::uint16_t> groups(operand.groups);
    Matrix weight = operand.matrix();
    weight.data = panels.get();
    weight.input_groups = operand.groups.empty() ? nullptr : groups.get();
    const Stored expected(c.dtype, operand.numbers);
    Stored out(c.dtype, expected.size());
    const StoredOnDevice there(out);
    cuda::unpack({.out = there.get(), .weight = weight}, nullptr);
    EXPECT_TRUE(there.read() == expected) << name_of(c);
  }
}

TEST_F(CudaUnpack, EveryBfloat16ComesOutOfBfloat12WithItsOwnBits) {
  const EveryBfloat16 every;
  const DeviceBytes panels(every.panels.data(), every.panels.size());
  const OnDevice<std::uint16_t> out(every.bits.size());
  cuda::unpack({.out = out.get(), .weight = every.matrix(panels.get())}, nullptr);
  EXPECT_EQ(out.read(), every.bits);
}

}  // namespace
}  // namespace poise::test
