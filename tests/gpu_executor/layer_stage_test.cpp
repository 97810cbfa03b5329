#include "gpu_executor/layer_stage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>

#include "gpu_executor/order_check/order_check.h"
#include "gpu_executor/pipeline.h"
#include "tests/gpu_executor/pipeline_run.h"
#include "tests/gpu_executor/recording_device.h"

namespace poise::test {
namespace {

// Copies arrive at once, so a launch finds the tables that the pipeline sent ahead.
class CopyingDevice final : public RecordingDevice {
 public:
  struct Launch {
    std::string mini_batch;  // the same for all launches of one in one layer
    bool absorbs;
    std::int32_t max_new_tokens, max_context;
    std::vector<AttentionSequence> sequences;
  };
  const std::vector<Launch>& launches() const { return launches_; }

  void copy(Stream stream, std::span<const Copy> copies) override {
    for (const Copy& one : copies) {
      std::memcpy(one.to, one.from, static_cast<std::size_t>(one.bytes.n));
    }
    RecordingDevice::copy(stream, copies);
  }
  using RecordingDevice::launch;
  void launch(const Attention& op) override { add(op, false); }
  void launch(const AbsorbedAttention& op) override { add(op.attention, true); }

 private:
  void add(const Attention& op, bool absorbs) {
    RecordingDevice::launch(op);
    launches_.push_back({.mini_batch = std::to_string(order) + " " + queued().back().range,
                         .absorbs = absorbs,
                         .max_new_tokens = op.max_new_tokens,
                         .max_context = op.max_context,
                         .sequences = {op.sequences, op.sequences + op.sequence_count}});
  }

  std::vector<Launch> launches_;
};

// All orders of a plan queued, and what each piece of their work waits for.
class QueuedPlan {
 public:
  QueuedPlan(const Plan& plan, std::int32_t resident)
      : model_(tiny_shape(), DType::float32, 3), pool_(1 << 20) {
    Setting setting;
    setting.limits.resident_layers = resident;
    setting.limits.absorption = plan.absorbed != nullptr;
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

  // Of attention, in the order of the orders.
  const std::vector<CopyingDevice::Launch>& launches() const { return device_.launches(); }

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
  CopyingDevice device_;
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

// The sequence of a launch that has the most new rows decides for all of it.
TEST(LayerStage, SequencesOfOneRowAreAttendedApartFromPrompts) {
  Plan plan = some_plan(false);
  plan.chunk = 5;  // the fourth of a prompt of 16 tokens has one, and so has a prompt of one token
  plan.per_batch = 6;
  plan.absorbed = [](std::uint32_t request, std::uint32_t) { return request % 3 == 0; };
  std::map<std::string, std::set<int>> kinds;  // of each mini-batch and layer: 0 one row, 1 more, 2 absorbed
  std::map<std::string, std::set<std::int32_t>> first_rows;
  const QueuedPlan queued(plan, 0);
  for (const CopyingDevice::Launch& launch : queued.launches()) {
    std::int32_t most = 0, fewest = INT32_MAX, context = 0;
    for (const AttentionSequence& one : launch.sequences) {
      most = std::max(most, one.new_tokens);
      fewest = std::min(fewest, one.new_tokens);
      context = std::max(context, one.context + one.new_tokens);
      EXPECT_TRUE(first_rows[launch.mini_batch].insert(one.first_row).second) << "attended twice";
    }
    EXPECT_EQ(launch.max_new_tokens, most);
    EXPECT_EQ(launch.max_context, context);
    EXPECT_TRUE(most == 1 || fewest > 1);
    EXPECT_TRUE(most == 1 || !launch.absorbs);
    EXPECT_TRUE(kinds[launch.mini_batch].insert(launch.absorbs ? 2 : most > 1 ? 1 : 0).second);
  }
  std::set<std::set<int>> together;
  for (const auto& [mini_batch, some] : kinds) {
    together.insert(some);
  }
  EXPECT_TRUE(together.contains({0, 1})) << "prompts beside a row";
  EXPECT_TRUE(together.contains({0, 2})) << "rows that absorb beside others";
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
