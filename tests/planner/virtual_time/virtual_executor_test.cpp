#include "planner/virtual_time/virtual_executor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tests/planner/virtual_time/one_request.h"
#include "tests/support/small_shape.h"

namespace poise {
namespace {

constexpr std::int32_t kDecoderLayers = 4;

WeightLayout small_layout() {
  const ModelShape shape = testing_support::small_shape(kDecoderLayers);
  return weight_layout(shape, DType::float16);
}

// A block of either kind takes a second over the link, all other work what the test says.
Profile seconds_a_block() {
  Profile profile;
  profile.load_kv.b = profile.load_act.b = 1;
  profile.kv_gen.b = 0.25;
  profile.attention.b = 0.01;
  return profile;
}

// `batches` mini-batches of one decoding request each, with these numbers of full blocks of each kind.
messages::IterationT decoding(int batches, std::uint32_t act, std::uint32_t kv) {
  messages::IterationT tables;
  for (int i = 0; i < batches; ++i) {
    tables.mini_batches.push_back(
        testing_support::one_request(static_cast<std::size_t>(i), act, kv, 1));
  }
  return tables;
}

std::vector<VirtualSpan> spans_of(const Profile& profile, const messages::IterationT& tables,
                                  std::int32_t resident) {
  VirtualExecutor executor(profile, small_layout(),
                           {.resident_layers = resident, .max_mini_batch_rows = 64});
  std::vector<VirtualSpan> spans;
  executor.trace(&spans);
  executor.run(tables, true);
  return spans;
}

std::vector<VirtualSpan> of_kind(const std::vector<VirtualSpan>& spans, VirtualSpan::Kind kind,
                                 std::uint32_t layer) {
  std::vector<VirtualSpan> found;
  for (const VirtualSpan& span : spans) {
    if (span.kind == kind && span.layer == layer) {
      found.push_back(span);
    }
  }
  return found;
}

TEST(VirtualExecutor, MakesKeysAndValuesAgainWhileKvBlocksCross) {
  const auto spans = spans_of(seconds_a_block(), decoding(1, 4, 8), kDecoderLayers);
  const auto loads = of_kind(spans, VirtualSpan::Kind::load, 0);
  ASSERT_EQ(loads.size(), 2u);
  EXPECT_DOUBLE_EQ(loads[0].end.n, 4);
  EXPECT_DOUBLE_EQ(loads[1].end.n, 12);
  const auto kv_gen = of_kind(spans, VirtualSpan::Kind::kv_gen, 0);
  ASSERT_EQ(kv_gen.size(), 1u);
  EXPECT_DOUBLE_EQ(kv_gen[0].begin.n, 4) << "once its ACT blocks are there";
  EXPECT_DOUBLE_EQ(kv_gen[0].end.n, 5);
  EXPECT_DOUBLE_EQ(of_kind(spans, VirtualSpan::Kind::attention, 0).at(0).begin.n, 12);
}

// Four ACT blocks and the new row's, beside eight KV blocks.
// The products of a layer take ten times as long as a load.
TEST(VirtualExecutor, LoadsAsManyMiniBatchesAheadAsThereAreSides) {
  Profile profile = seconds_a_block();
  profile.forward.a = 10;
  for (const std::int32_t sides : {kFewestSides, kMostSides}) {
    VirtualExecutor executor(profile, small_layout(),
                             {.resident_layers = kDecoderLayers, .max_mini_batch_rows = 64, .sides = sides});
    std::vector<VirtualSpan> spans;
    executor.trace(&spans);
    executor.run(decoding(4, 0, 1), true);
    Seconds made{};  // of the first layer
    for (const VirtualSpan& span : spans) {
      made = span.kind == VirtualSpan::Kind::products && span.layer == 0 ? span.end : made;
    }
    const auto ahead = std::ranges::count_if(spans, [&](const VirtualSpan& span) {
      return span.kind == VirtualSpan::Kind::load && span.layer == 1 && span.end <= made;
    });
    EXPECT_EQ(ahead, sides);
  }
}

TEST(VirtualExecutor, AbsorbsActivationsInsteadOfMakingKeysOfThem) {
  messages::IterationT tables = decoding(1, 4, 8);
  messages::MiniBatchT& batch = *tables.mini_batches[0];
  batch.regenerate.clear();
  for (std::uint32_t block = 0; block < 13; ++block) {
    const bool kv = block < 8;
    batch.entries.emplace_back(kv ? messages::Where::LoadedKv : messages::Where::Activation,
                               kv ? messages::Kind::Kv : messages::Kind::Act, messages::Place::Host,
                               0, kv ? block : block - 8, block);
  }
  Profile profile = seconds_a_block();
  profile.absorb_rows.b = 3;
  profile.absorb.b = 0.5;
  VirtualExecutor executor(
      profile, small_layout(),
      {.resident_layers = kDecoderLayers, .max_mini_batch_rows = 64, .absorption = true});
  std::vector<VirtualSpan> spans;
  executor.trace(&spans);
  executor.run(tables, true);
  EXPECT_TRUE(of_kind(spans, VirtualSpan::Kind::kv_gen, 0).empty());
  const VirtualSpan attended = of_kind(spans, VirtualSpan::Kind::attention, 0).at(0);
  EXPECT_DOUBLE_EQ(attended.begin.n, 12);
  EXPECT_NEAR(attended.end.n - attended.begin.n, 8 * 0.01 + 3 + 4 * 0.5, 1e-9)
      << "five absorbed blocks, the first with the row";
  profile.absorb = profile.absorb_rows = {};
  EXPECT_NEAR(profile.absorb_of(5, 1).n, 5 * (0.25 + 0.01), 1e-9) << "as if keys were made";
}

// The buffer of rows that become codes holds 16: a block is made at a time.
TEST(VirtualExecutor, MakesCodesInAsManyPartsAsABufferOfRowsHolds) {
  Profile profile = seconds_a_block();
  profile.kv_gen.a = 3;
  const auto kv_gen_time = [&](KvFormat format) {
    VirtualExecutor executor(
        profile, small_layout(),
        {.resident_layers = kDecoderLayers, .max_mini_batch_rows = 16, .kv_format = format});
    executor.run(decoding(1, 4, 8), true);
    return executor.compute_busy();
  };
  EXPECT_NEAR((kv_gen_time(KvFormat::int4) - kv_gen_time(KvFormat::plain)).n,
              kDecoderLayers * 3 * 3.0, 1e-9);
}

// Two of four layers have a window, in which the last two blocks of ten are seen.
TEST(VirtualExecutor, LoadsWhatIsSeenAloneInLayersWithAWindow) {
  messages::IterationT tables = decoding(1, 0, 10);
  messages::MiniBatchT& batch = *tables.mini_batches[0];
  for (std::uint32_t block = 0; block < 11; ++block) {
    batch.entries.emplace_back(messages::Where::LoadedKv, messages::Kind::Kv, messages::Place::Host,
                               0, block, block);
  }
  batch.loads.clear();
  batch.loads.emplace_back(messages::Kind::Kv, messages::Place::Host, kBlockTokens, 8, 0, 0);
  batch.loads.emplace_back(messages::Kind::Kv, messages::Place::Host, kBlockTokens, 2, 8, 8);
  const DeviceLimits limits{.resident_layers = kDecoderLayers, .max_mini_batch_rows = 64};
  VirtualExecutor full(seconds_a_block(), small_layout(), limits);
  VirtualExecutor windowed(seconds_a_block(), small_layout(), limits, {0, 32, 0, 32});
  full.run(tables, true);
  windowed.run(tables, true);
  EXPECT_DOUBLE_EQ(full.volume().kv, 40);
  EXPECT_DOUBLE_EQ(windowed.volume().kv, 24);
  EXPECT_NEAR((full.now() - windowed.now()).n, 16, 0.5);
}

// A mini-batch of a request whose nine blocks are read where they lie.
void attend_on_host(messages::MiniBatchT& batch) {
  batch.loads.clear();
  for (std::uint32_t block = 0; block < 9; ++block) {
    batch.entries.emplace_back(messages::Where::HostInPlace, messages::Kind::Kv,
                               messages::Place::Host, 0, 0, 20 + block);
  }
}

// The second of two mini-batches is attended on host cores: from the group's queries on, while the first
// one's blocks cross the link and are attended.
TEST(VirtualExecutor, HostCoresWorkWhileTheLinkAndTheDeviceDo) {
  messages::IterationT tables = decoding(2, 0, 8);
  attend_on_host(*tables.mini_batches[1]);
  Profile profile = seconds_a_block();
  profile.qkv.b = 0.25;  // of two rows: half a second
  profile.forward.b = 0.25;
  profile.host_attention.b = 0.5;
  profile.host_down.b = 0.125;
  profile.host_up.b = 0.25;
  const auto spans = spans_of(profile, tables, kDecoderLayers);
  EXPECT_EQ(of_kind(spans, VirtualSpan::Kind::load, 0).size(), 1u);
  const auto attended = of_kind(spans, VirtualSpan::Kind::host, 0);
  ASSERT_EQ(attended.size(), 1u);
  EXPECT_DOUBLE_EQ(attended[0].begin.n, 0.625) << "behind the queries and their way down";
  EXPECT_DOUBLE_EQ(attended[0].end.n, 0.625 + 129.0 / 16 / 2) << "of 128 rows and the new one";
  const auto on_device = of_kind(spans, VirtualSpan::Kind::attention, 0);
  ASSERT_EQ(on_device.size(), 2u);
  EXPECT_DOUBLE_EQ(on_device[0].begin.n, 8);
  EXPECT_DOUBLE_EQ(on_device[1].end.n, on_device[0].end.n + 0.25) << "its output alone comes up";
  profile.host_attention.b = 2;  // now the host cores are the last
  const auto slow = spans_of(profile, tables, kDecoderLayers);
  EXPECT_DOUBLE_EQ(of_kind(slow, VirtualSpan::Kind::attention, 0).at(1).begin.n,
                   0.625 + 2 * 129.0 / 16);
}

// Each takes a part of the host memory's speed as long as it works. Alone the link needs eight seconds in each layer here.
TEST(VirtualExecutor, HostCoresAndTheLinkSlowEachOtherDown) {
  messages::IterationT tables = decoding(2, 0, 8);
  attend_on_host(*tables.mini_batches[1]);
  Profile profile = seconds_a_block();
  const auto seconds_of = [&](double beside, double alone, VirtualSpan::Kind kind) {
    profile.host_attention.b = beside;
    profile.host_attention_undisturbed = Line{.b = alone};
    const auto one = of_kind(spans_of(profile, tables, kDecoderLayers), kind, 0).at(0);
    return one.end.n - one.begin.n;
  };
  constexpr auto kHost = VirtualSpan::Kind::host, kLoad = VirtualSpan::Kind::load;
  const double blocks = 129.0 / 16;
  EXPECT_DOUBLE_EQ(seconds_of(0.5, 0.25, kHost), blocks * 0.5) << "done before the link is";
  EXPECT_DOUBLE_EQ(seconds_of(2, 1, kHost), 8 + (1 - 8 / (blocks * 2)) * blocks) << "then faster";
  EXPECT_DOUBLE_EQ(seconds_of(2, 3, kHost), blocks * 2) << "disturbed ones are never faster";
  EXPECT_DOUBLE_EQ(seconds_of(2, 1, kLoad), 8);
  profile.kv_slowdown = 1.25;
  EXPECT_DOUBLE_EQ(seconds_of(2, 1, kLoad), 10);
  EXPECT_DOUBLE_EQ(seconds_of(2, 1, kHost), 10 + (1 - 10 / (blocks * 2)) * blocks);
  const double attended = blocks * 0.5;
  EXPECT_DOUBLE_EQ(seconds_of(0.5, 0.25, kLoad), attended + (8 - attended / 1.25))
      << "then at its own pace";
  tables = decoding(2, 4, 4);
  attend_on_host(*tables.mini_batches[1]);
  profile.act_slowdown = 1.75;
  EXPECT_DOUBLE_EQ(seconds_of(2, 1, kHost), 12 + (1 - 12 / (blocks * 2)) * blocks);
  EXPECT_DOUBLE_EQ(seconds_of(2, 1, kLoad), 6) << "the mean of both kinds, for either";
}

// A prompt fills a group, so the mini-batch of host cores has one of its own: its queries are made first, and the
// prompt is computed meanwhile.
TEST(VirtualExecutor, HostCoresWorkWhileThePromptsOfOtherGroupsAreComputed) {
  messages::IterationT tables = decoding(3, 0, 8);
  messages::MiniBatchT& prompt = *tables.mini_batches[1];
  prompt.loads.clear();
  prompt.tokens.assign(64, 1);
  prompt.sequences[0] = messages::Sequence(1, 0, 64, 0, 0);
  attend_on_host(*tables.mini_batches[2]);
  Profile profile = seconds_a_block();
  profile.qkv.b = 0.25;
  profile.forward.b = 0.5;
  profile.host_attention.b = 2;
  profile.host_down.b = 0.125;
  profile.host_up.b = 0.25;
  const auto spans = spans_of(profile, tables, kDecoderLayers);
  const auto attended = of_kind(spans, VirtualSpan::Kind::host, 0);
  ASSERT_EQ(attended.size(), 1u);
  EXPECT_DOUBLE_EQ(attended[0].begin.n, 0.375) << "behind its own queries alone";
  const auto products = of_kind(spans, VirtualSpan::Kind::products, 0);
  ASSERT_EQ(products.size(), 6u);
  EXPECT_DOUBLE_EQ(products[1].begin.n, 0.375)
      << "the next queries lie where those were that go down";
  EXPECT_LT(products[3].begin.n, attended[0].end.n) << "the prompt's";
  const auto on_device = of_kind(spans, VirtualSpan::Kind::attention, 0);
  EXPECT_DOUBLE_EQ(on_device.back().begin.n, std::max(attended[0].end.n, products[4].end.n));
}

}  // namespace
}  // namespace poise
