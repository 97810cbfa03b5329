#include "gpu_executor/layer_stage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "gpu_executor/order_check/order_check.h"
#include "gpu_executor/pipeline.h"
#include "tests/gpu_executor/pipeline_run.h"
#include "tests/gpu_executor/recording_device.h"

namespace poise::test {
namespace {

// All orders of a plan queued, and what each piece of their work waits for.
class QueuedPlan {
 public:
  QueuedPlan(const Plan& plan, std::int32_t resident)
      : model_(tiny_shape(), DType::float32, 3), pool_(1 << 20) {
    Setting setting;
    setting.limits.resident_layers = resident;
    const BlockSizes sizes = block_sizes(model_.shape, model_.dtype, KvFormat::plain);
    const PoolPartition partition{.region_bytes = static_cast<std::uint64_t>(
                                      round_up(sizes.block(BlockKind::act).n * setting.act_blocks +
                                                   sizes.block(BlockKind::kv).n * setting.kv_blocks,
                                               4096)),
                                  .act_blocks = setting.act_blocks,
                                  .kv_blocks = setting.kv_blocks};
    pool_.resize(partition.region_bytes * 3);
    region_ = partition.region_bytes;
    act_bytes_ = static_cast<std::size_t>(sizes.block(BlockKind::act).n) * setting.act_blocks;
    Pipeline pipeline(device_,
                      {.shape = model_.shape,
                       .dtype = model_.dtype,
                       .layout = model_.layout,
                       .weights = model_.bytes},
                      setting.limits, device_.memory(), true);
    OrderCheck check(model_.shape, model_.layout, setting.limits, 1'000'000);
    SmallPlanner planner(plan, model_.layout, setting.limits, partition);
    for (Planned planned = planner.next(); !planned.orders.empty(); planned = planner.next()) {
      const Packed<messages::Iteration> tables(planned.tables);
      pipeline.begin(*tables, check.accept(*tables, {.epoch = 1, .partition = partition}),
                     {.data = pool_.data(), .partition = partition});
      for (const messages::LayerOrderT& native : planned.orders) {
        const Packed<messages::LayerOrder> order(native);
        check.accept(*order);
        pipeline.submit(make_order(*order, ++device_.order));
      }
    }
  }

  // For each range `kind`, of one mini-batch ("KvGen 0") or of all: what its own order has before it.
  struct Before {
    std::set<BlockKind> loaded;  // of its mini-batch, from the host
    bool act_expected = false, kv_expected = false;
    bool weights = false;  // that its own order fetched
  };
  std::vector<Before> before(const std::string& kind) const {
    std::vector<Before> all;
    const auto& queued = device_.queued();
    for (std::size_t i = 0; i < queued.size(); ++i) {
      const std::string& range = queued[i].range;
      if ((range != kind && !range.starts_with(kind + " ")) ||
          (i > 0 && queued[i - 1].range == range)) {
        continue;
      }
      Before found;
      const std::string load = "Load" + range.substr(range.find(' '));
      for (const std::size_t one : device_.before(i)) {
        const Queued& work = queued[one];
        if (work.order != queued[i].order) {
          continue;
        }
        found.weights = found.weights || !work.uploads.empty();
        if (work.range == load) {
          add_kinds(work, found.loaded);
        }
      }
      std::set<BlockKind> expected;
      for (const Queued& work : queued) {
        if (work.order == queued[i].order && work.range == load) {
          add_kinds(work, expected);
        }
      }
      found.act_expected = expected.contains(BlockKind::act);
      found.kv_expected = expected.contains(BlockKind::kv);
      all.push_back(found);
    }
    return all;
  }

  // The launches of each mini-batch in each layer.
  std::vector<std::vector<Queued>> attention() const {
    std::vector<std::vector<Queued>> all;
    std::string last;
    for (const Queued& work : device_.queued()) {
      const std::string range = std::to_string(work.order) + " " + work.range;
      if (work.attention) {
        if (range != std::exchange(last, range)) {
          all.emplace_back();
        }
        all.back().push_back(work);
      }
    }
    return all;
  }

 private:
  void add_kinds(const Queued& work, std::set<BlockKind>& kinds) const {
    for (const Copy& copy : work.copies) {
      const auto* from = static_cast<const std::byte*>(copy.from);
      if (from >= pool_.data() && from < pool_.data() + pool_.size()) {
        const auto within = static_cast<std::size_t>(from - pool_.data()) % region_;
        kinds.insert(within < act_bytes_ ? BlockKind::act : BlockKind::kv);
      }
    }
  }

  TinyModel model_;
  std::vector<std::byte> pool_;
  std::size_t region_ = 0, act_bytes_ = 0;
  RecordingDevice device_;
};

Plan some_plan(bool late) {
  return {.sequences = random_sequences(tiny_shape(), {37, 21, 1, 50, 16, 33}, 7),
          .kind = mixed,
          .late_weights = late};
}

TEST(PipelineEnd, ABrokenDeviceDoesNotHideWhyTheProcessEnds) {
  const TinyModel model(tiny_shape(), DType::float32, 3);
  RecordingDevice device;
  try {
    Pipeline pipeline(device,
                      {.shape = model.shape,
                       .dtype = model.dtype,
                       .layout = model.layout,
                       .weights = model.bytes},
                      Setting().limits, device.memory(), true);
    device.is_broken = true;
    fail(Exit::device_failed, "the first call that failed");
  } catch (const Failure& failure) {
    EXPECT_STREQ(failure.what(), "the first call that failed");
  }
}

TEST(LayerStage, KvGenWaitsForItsActBlocksAndForNoKvBlocks) {
  for (const std::int32_t resident : {0, 3}) {
    const QueuedPlan plan(some_plan(false), resident);
    int with_both = 0;
    for (const auto& before : plan.before("KvGen")) {
      EXPECT_TRUE(before.act_expected);
      EXPECT_TRUE(before.loaded.contains(BlockKind::act));
      EXPECT_FALSE(before.loaded.contains(BlockKind::kv));
      with_both += before.kv_expected ? 1 : 0;
    }
    EXPECT_GT(with_both, 10);
  }
}

TEST(LayerStage, AttentionWaitsForAllBlocksOfItsMiniBatch) {
  const QueuedPlan plan(some_plan(false), 0);
  for (const auto& before : plan.before("Attention")) {
    EXPECT_EQ(before.loaded.contains(BlockKind::act), before.act_expected);
    EXPECT_EQ(before.loaded.contains(BlockKind::kv), before.kv_expected);
  }
}

// A launch's longest sequence decides how many thread blocks share each of its contexts.
TEST(LayerStage, PromptsAreAttendedApartFromTheRowsThatDecodeInTheirMiniBatch) {
  Plan plan = some_plan(false);
  plan.chunk = 5;  // the fourth of a prompt of 16 tokens has one, and so has a prompt of one token
  int with_both = 0;
  for (const auto& launches : QueuedPlan(plan, 0).attention()) {
    ASSERT_LE(launches.size(), 2u);
    for (const Queued& one : launches) {
      std::int32_t rows = 0, context = 0;
      for (const AttentionSequence& sequence : one.sequences) {
        rows = std::max(rows, sequence.new_tokens);
        context = std::max(context, sequence.context + sequence.new_tokens);
      }
      EXPECT_EQ(one.attention->max_new_tokens, rows);
      EXPECT_LE(context, one.attention->max_context);
      EXPECT_TRUE(rows > 1 || context == one.attention->max_context);
    }
    if (launches.size() == 2) {
      EXPECT_EQ(launches[0].attention->max_new_tokens, 1);
      EXPECT_GT(launches[1].attention->max_new_tokens, 1);
      ++with_both;
    }
  }
  EXPECT_EQ(with_both, 2 * tiny_shape().num_hidden_layers);
}

TEST(LayerStage, KvGenAndStoresWaitForNoOtherWeightsThanTheFirst) {
  const QueuedPlan plan(some_plan(true),
                        0);  // all others come behind the first mini-batch's blocks
  for (const char* kind : {"KvGen 0", "Store 0"}) {
    const auto all = plan.before(kind);
    EXPECT_GT(all.size(), 10u);
    for (const auto& before : all) {
      EXPECT_FALSE(before.weights) << kind;
    }
  }
  for (const auto& before : plan.before("Attention")) {
    EXPECT_TRUE(before.weights) << "queries need W_Q";
  }
}

}  // namespace
}  // namespace poise::test
