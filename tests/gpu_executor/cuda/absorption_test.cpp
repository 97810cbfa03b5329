// Single rows that attend activations as they are on a GPU, through the pipeline.
#include "gpu_executor/cuda/cuda_device.h"
#include "tests/gpu_executor/absorbing_plan.h"
#include "tests/support/cuda_test.h"

namespace poise::test {
namespace {

class AbsorptionOnAGpu : public CudaTest {
 protected:
  static Outcome run(const TinyModel& model, const Plan& plan, const Setting& setting) {
    return PipelineRun(model, plan, setting, open_cuda_device(2, false)).run();
  }
};

TEST_F(AbsorptionOnAGpu, GivesTheReferencesLogitsWithBlocksScatteredOverAllPlaces) {
  // Numbers between operations are of the stored type.
  const std::pair<DType, double> kinds[] = {
      {DType::float32, 1e-3}, {DType::float16, 2e-2}, {DType::bfloat16, 1e-1}};
  std::uint32_t seed = 1;
  for (const ModelShape& shape : {tiny_shape(), post_norm_shape(), with_shared_keys()}) {
    for (const auto& [dtype, tolerance] : kinds) {
      const TinyModel model(shape, dtype, 20 + seed);
      Plan plan = scattered(shape, seed);
      plan.per_batch = 1 + static_cast<std::int32_t>(seed % 3);
      Setting setting = absorbing();
      setting.limits.resident_layers = static_cast<std::int32_t>(seed % 4);
      expect_as_plain(model, plan, run(model, plan, setting), tolerance);
      ++seed;
    }
  }
}

TEST_F(AbsorptionOnAGpu, HasTheSameBitsHoweverMiniBatchesAreCutAndWhateverTheOtherBlocksHold) {
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    const TinyModel model(tiny_shape(), dtype, 11);
    Plan plan = scattered(model.shape, 5);
    plan.on_host = nullptr;
    plan.per_batch = 1;
    const auto expected = run(model, plan, absorbing()).rows;
    for (const std::int32_t per_batch : {2, 6}) {
      for (const BlockKind other : {BlockKind::kv, BlockKind::act}) {
        Plan changed = plan;
        changed.per_batch = per_batch;
        changed.chunk = per_batch == 2 ? 7 : 1000;
        changed.seed = static_cast<std::uint32_t>(per_batch);
        changed.kind = [&](std::uint32_t request, std::uint32_t block) {
          return plan.absorbed(request, block) ? BlockKind::act : other;
        };
        EXPECT_TRUE(run(model, changed, absorbing()).rows == expected);
      }
    }
    plan.absorbed = nullptr;
    EXPECT_FALSE(run(model, plan, absorbing()).rows == expected) << "nothing was absorbed";
  }
}

}  // namespace
}  // namespace poise::test
