#include "planner/profile/profiling.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "common/trouble.h"
#include "planner/costs/prefill_pairs.h"
#include "planner/forecast/simulate_papers.h"

namespace poise {
namespace {

using messages::SpanKind;

ProfileSizes sizes_of(std::string_view model, ProfileScale scale = kLargestProfileScale) {
  return profile_sizes(opt_shape(model), DType::float16, scale, kGiB * 2, kGiB, kGiB * 24);
}

TEST(ProfileSizes, FitUnderTheCap) {
  for (const char* model : {"opt-1.3b", "opt-30b", "opt-175b"}) {
    for (const std::int64_t gib : {12, 24, 80}) {
      const ModelShape shape = opt_shape(model);
      const ProfileSizes sizes =
          profile_sizes(shape, DType::float16, kLargestProfileScale, kGiB * 2, kGiB, kGiB * gib);
      EXPECT_LE(plan_device_memory(shape, DType::float16, sizes.device, kGiB).total, kGiB * gib);
      EXPECT_LT(sizes.device.resident_layers, shape.num_hidden_layers) << "weights are streamed";
    }
  }
  EXPECT_THROW(profile_sizes(opt_shape("opt-175b"), DType::float16, kLargestProfileScale, kGiB,
                             kGiB, kGiB * 2),
               Failure);
}

TEST(ProfileSizes, AreThoseOfAModelThatFillsABlock) {
  ModelShape shape = opt_shape("opt-1.3b");
  for (const std::int32_t positions : {16, 31, 32}) {
    shape.max_position_embeddings = positions;
    const ProfileSizes sizes =
        profile_sizes(shape, DType::float16, kFirstProfileScale, kGiB, kGiB, kGiB * 24);
    EXPECT_LE(sizes.device.max_context, positions);
  }
  shape.max_position_embeddings = 15;
  EXPECT_THROW(profile_sizes(shape, DType::float16, kFirstProfileScale, kGiB, kGiB, kGiB * 24),
               Failure);
}

TEST(BusyWork, HasAsManyBlocksOfTheHostAsTheLinkBrings) {
  Profile profile;
  profile.kv_gen = {.b = 1.4e-6};
  profile.load_act = {.b = 2.4e-6};
  profile.load_w = {.b = 7.3e-3};
  EXPECT_NEAR(busy_work(profile, 512, 32, 0).from_host, 0.85 * 1.4 / 2.4, 1e-12);
  EXPECT_EQ(busy_work(profile, 512, 32, 0).repeats, 0);
  profile.kv_gen.b = 1;
  EXPECT_EQ(busy_work(profile, 512, 32, 0).from_host, 1);
}

TEST(BusyWork, ComputesLongerThanTheLinkBringsALayersWeightsAndItsBlocks) {
  Profile profile;
  profile.kv_gen = {.b = 1.4e-6};
  profile.load_act = {.b = 2.4e-6};
  profile.load_w = {.b = 7.3e-3};
  const BusyWork busy = busy_work(profile, 512, 32, 4);
  const double blocks = 0.84 * 512 * busy.repeats, computes = blocks * 1.4e-6;
  const double link = 7.3e-3 + blocks * busy.from_host * 2.4e-6;
  EXPECT_LE(link, 0.85 * computes);
  EXPECT_GE(link, 0.75 * computes) << "no more than it takes";
  EXPECT_NEAR(time_of(busy, profile, 32).n, 32 * (blocks + 4.5 * 512) * 1.4e-6, 1e-9);
  // A model whose weights take as long as ten thousands of blocks, on a GPU that is slow.
  profile.kv_gen.b = 58e-6;
  profile.load_w.b = 0.165;
  EXPECT_LE(time_of(busy_work(profile, 512, 96, 90), profile, 96).n, 20.0);
}

TEST(ProfileIteration, KeepsADeviceBusyWithBlocksOfBothPlaces) {
  ProfileSizes sizes = sizes_of("opt-6.7b", kLargestProfileScale);
  for (const double share : {0.0, 0.5, 1.0}) {
    sizes.busy = {.repeats = 3, .blocks = kLargestProfileScale.blocks, .from_host = share};
    sizes.scale.blocks = kLargestProfileScale.blocks / 4;
    const auto tables =
        profile_iteration(ProfileWork::context_busy, sizes, opt_shape("opt-6.7b"), 1, 1, 0, 3);
    EXPECT_EQ(tables.mini_batches.size(), 3u + 8u) << "the scale's sizes come behind the largest";
    EXPECT_EQ(std::ssize(tables.mini_batches[3]->entries), sizes.scale.blocks);
    const messages::MiniBatchT& largest = *tables.mini_batches.front();
    std::int64_t host = 0, all = 0;
    for (const auto& run : largest.loads) {
      EXPECT_EQ(run.kind(), messages::Kind::Act);
      host += run.place() == messages::Place::Host ? run.count() : 0;
      all += run.count();
    }
    EXPECT_EQ(all, kLargestProfileScale.blocks);
    EXPECT_EQ(host, std::llround(share * kLargestProfileScale.blocks));
    ASSERT_EQ(largest.regenerate.size(), 1u);
    EXPECT_EQ(largest.regenerate[0].count(), unsigned(kLargestProfileScale.blocks));
    EXPECT_EQ(largest.entries.size(), unsigned(kLargestProfileScale.blocks));
    EXPECT_EQ(largest.tokens.size(), largest.sequences.size());
  }
}

// The fewer positions, the more sequences the blocks take.
TEST(ProfileIteration, KeepsADeviceBusyWithNoMoreSequencesThanFit) {
  for (const std::int32_t positions : {16, 320, 512, 1024, 2048, 8192}) {
    ModelShape shape = opt_shape("opt-6.7b");
    shape.max_position_embeddings = positions;
    for (const std::int32_t blocks : {1, 8, 56, 512}) {
      ProfileSizes sizes = profile_sizes(shape, DType::float16, {.blocks = blocks, .rows = 64},
                                         kGiB, kGiB, kGiB * 24);
      for (int percent = 0; percent <= 100; ++percent) {
        sizes.busy = {.repeats = 48, .blocks = sizes.scale.blocks, .from_host = percent / 100.0};
        const auto tables = profile_iteration(ProfileWork::context_busy, sizes, shape, 1, 1, 0, 3);
        std::int64_t rows = 0;
        for (const auto& batch : tables.mini_batches) {
          rows += std::ssize(batch->tokens);
          EXPECT_LE(std::ssize(batch->tokens), sizes.device.max_mini_batch_rows);
          EXPECT_LE(std::ssize(batch->sequences), sizes.device.max_sequences)
              << positions << " positions, " << blocks << " blocks, " << percent << " %";
        }
        EXPECT_LE(rows, sizes.device.max_rows);
      }
    }
  }
}

TEST(ProfileIteration, StaysWithinTheBuffersAndThePool) {
  for (const ProfileScale scale : {kFirstProfileScale, kFirstProfileScaleOnGpu,
                                   ProfileScale{56, 136}, kLargestProfileScale}) {
    const ProfileSizes sizes = profile_sizes(opt_shape("opt-6.7b"), DType::float16, scale, kGiB * 2,
                                             kGiB, kGiB * 24, KvFormat::plain, kGiB * 24);
    std::vector<ProfileWork> works(kProfileWork.begin(), kProfileWork.end());
    works.insert(works.end(), {ProfileWork::prompts_here, ProfileWork::context_host,
                               ProfileWork::context_host_link});
    for (const ProfileWork work : works) {
      const auto tables = profile_iteration(work, sizes, opt_shape("opt-6.7b"), 1, 1, 0, 3);
      std::size_t rows = 0;
      for (const auto& batch : tables.mini_batches) {
        rows += batch->tokens.size();
        EXPECT_LE(std::ssize(batch->tokens), sizes.device.max_mini_batch_rows);
        EXPECT_LE(std::ssize(batch->sequences), sizes.device.max_sequences);
        const bool on_host = batch->entries[0].where() == messages::Where::HostInPlace;
        EXPECT_LE(std::ssize(batch->entries),
                  on_host ? sizes.host.kv_blocks : sizes.device.max_entries());
        for (const auto& run : batch->loads) {
          const bool act = run.kind() == messages::Kind::Act;
          EXPECT_LE(run.first_slot() + run.count(),
                    unsigned(act ? sizes.device.act_slots : sizes.device.kv_slots));
          EXPECT_LE(run.first_block() + run.count(), run.place() == messages::Place::Gpu
                                                         ? sizes.host.gpu_act_blocks
                                                     : act ? sizes.host.act_blocks
                                                           : sizes.host.kv_blocks);
        }
      }
      EXPECT_LE(std::int64_t(rows), sizes.device.max_rows);
    }
  }
}

// A small cap halves the scale again and again: below what a few rows load, and to sizes whose
// neighbours do not fill their blocks.
TEST(ProfileIteration, StaysWithinTheBuffersOfEveryScale) {
  const ModelShape shape = opt_shape("opt-6.7b");
  for (std::int32_t rows = 8; rows <= 300; ++rows) {
    const ProfileScale scale{.blocks = 1 + rows % 9, .rows = rows};
    const ProfileSizes sizes = sizes_of("opt-6.7b", scale);
    std::vector<ProfileWork> works(kProfileWork.begin(), kProfileWork.end());
    works.push_back(ProfileWork::prompts_here);
    for (const ProfileWork work : works) {
      const auto tables = profile_iteration(work, sizes, shape, 1, 1, 0, 3);
      for (const auto& batch : tables.mini_batches) {
        EXPECT_LE(std::ssize(batch->tokens), sizes.device.max_mini_batch_rows) << rows;
        for (const auto& run : batch->loads) {
          const bool act = run.kind() == messages::Kind::Act;
          EXPECT_LE(run.first_slot() + run.count(),
                    unsigned(act ? sizes.device.act_slots : sizes.device.kv_slots))
              << rows;
        }
      }
    }
  }
}

TEST(ProfileIteration, OfAFewRowsHasNothingElse) {
  const ProfileSizes sizes = sizes_of("opt-6.7b", kLargestProfileScale);
  for (const int round : {0, 1, 2}) {
    const auto tables =
        profile_iteration(ProfileWork::context_few, sizes, opt_shape("opt-6.7b"), 1, 1, round, 3);
    ASSERT_EQ(tables.mini_batches.size(), 1u);
    EXPECT_EQ(tables.mini_batches[0]->tokens.size(), round == 1 ? 1u : 8u);
  }
}

// What a GPU multiplies must be numbers as in runs, and no zeros.
TEST(ProfileIteration, LoadsBlocksThatPromptsHaveWrittenBefore) {
  // Of few rows fewer fill a block: then it is no GPU.
  for (const auto& [scale, share] : {std::pair{ProfileScale{56, 136}, 0.6},
                                     {ProfileScale{200, 200}, 0.7},
                                     {kLargestProfileScale, 0.9}}) {
    const ProfileSizes sizes = sizes_of("opt-6.7b", scale);
    std::map<std::tuple<messages::Kind, messages::Place, std::uint32_t>, std::uint32_t> rows;
    std::uint32_t loaded = 0, written = 0;
    const auto visit = [&](ProfileWork work) {
      const auto tables = profile_iteration(work, sizes, opt_shape("opt-6.7b"), 1, 1, 0, 3);
      for (const auto& batch : tables.mini_batches) {
        for (const auto& store : batch->stores) {
          std::uint32_t& stored = rows[{store.kind(), store.place(), store.block()}];
          EXPECT_EQ(store.token(), stored) << "a block is written once";
          stored += store.count();
          EXPECT_TRUE(store.place() != messages::Place::Gpu ||
                      store.block() < sizes.host.gpu_act_blocks);
        }
        for (const auto& run : batch->loads) {
          for (std::uint32_t i = 0; i < run.count(); ++i) {
            loaded += kBlockTokens;
            written += rows[{run.kind(), run.place(), run.first_block() + i}];
          }
        }
      }
    };
    visit(ProfileWork::prompts_here);
    for (const ProfileWork work : kProfileWork) {
      visit(work);
    }
    EXPECT_GT(written, share * loaded) << scale.blocks << " blocks, " << scale.rows << " rows";
  }
}

// As the order check wants it: blocks are of one sequence in a mini-batch, each new row is stored once, and no
// block is read before a later mini-batch stores into it.
TEST(ProfileIteration, HostCoresAttendBlocksThatNothingElseWritesMeanwhile) {
  // A GPU has host cores attend as many blocks where its own mini-batches are smaller.
  const ProfileScale slow_gpu{184, 592, kLargestProfileScale.host_blocks};
  for (const ProfileScale scale : {kFirstProfileScale, kFirstProfileScaleOnGpu,
                                   ProfileScale{56, 136}, slow_gpu, kLargestProfileScale}) {
    const ProfileSizes sizes = profile_sizes(opt_shape("opt-6.7b"), DType::float16, scale, kGiB * 2,
                                             kGiB, kGiB * 24, KvFormat::plain, kGiB * 6);
    ASSERT_TRUE(sizes.device.host_attention);
    for (const ProfileWork work : {ProfileWork::context_host, ProfileWork::context_host_link}) {
      const auto tables = profile_iteration(work, sizes, opt_shape("opt-6.7b"), 1, 1, 0, 3);
      std::set<std::uint32_t> read, stored;
      std::set<std::size_t> blocks;
      for (const auto& batch : tables.mini_batches) {
        const bool on_host = batch->entries[0].where() == messages::Where::HostInPlace;
        EXPECT_TRUE(on_host || blocks.empty()) << "host cores come last";
        for (const auto& run : batch->loads) {
          for (std::uint32_t i = 0; run.kind() == messages::Kind::Kv && i < run.count(); ++i) {
            read.insert(run.first_block() + i);
          }
        }
        if (!on_host) {
          continue;
        }
        blocks.insert(batch->entries.size());
        std::set<std::uint32_t> own;
        for (const auto& entry : batch->entries) {
          EXPECT_EQ(entry.where(), messages::Where::HostInPlace);
          EXPECT_TRUE(own.insert(entry.block()).second);
          EXPECT_LT(entry.block(), sizes.host.kv_blocks);
        }
        for (const auto& store : batch->stores) {
          EXPECT_TRUE(stored.insert(store.block()).second);
          own.erase(store.block());
        }
        read.insert(own.begin(), own.end());
        EXPECT_EQ(batch->stores.size(), batch->tokens.size());
        EXPECT_LE(std::ssize(batch->sequences), sizes.device.max_sequences);
      }
      for (const std::uint32_t block : stored) {
        EXPECT_FALSE(read.contains(block));
      }
      EXPECT_GE(blocks.size(), scale.blocks > 8 ? 6u : 3u) << "sizes to fit a line to";
      const std::size_t most = *blocks.rbegin();
      EXPECT_GE(most, scale.host_blocks > 0 ? 512u : 8u) << "as much memory as no cache holds";
    }
  }
}

TEST(ProfileIteration, HostCoresReadEachBlockOfALayerOnceAndTheLinkIsFarAway) {
  const ModelShape shape = opt_shape("opt-6.7b");
  const ProfileSizes sizes = profile_sizes(shape, DType::float16, kLargestProfileScale, kGiB * 2,
                                           kGiB, kGiB * 24, KvFormat::plain, kGiB * 24);
  const auto tables = profile_iteration(ProfileWork::context_host_link, sizes, shape, 1, 1, 0, 3);
  std::set<std::uint32_t> attended;
  std::int64_t first_attended = -1, written = 0;
  for (const auto& batch : tables.mini_batches) {
    written += std::ssize(batch->stores);
    for (const auto& entry : batch->entries) {
      if (entry.where() == messages::Where::HostInPlace) {
        EXPECT_TRUE(attended.insert(entry.block()).second) << "a cache may hold what was read";
        first_attended = first_attended < 0 ? entry.block() : first_attended;
      }
    }
  }
  const Bytes block = block_sizes(shape, DType::float16, KvFormat::plain).block(BlockKind::kv);
  EXPECT_GE(std::ssize(attended) * block.n, std::int64_t{400} << 20);
  EXPECT_EQ(tables.mini_batches[0]->loads[0].first_block(), 0u);
  EXPECT_EQ(first_attended, (sizes.host.kv_blocks - written) / 2)
      << "what one has just read does not wait in a cache for the other";
}

// A machine that takes exactly a + b · n for everything.
struct Exact {
  Profile costs;
  double late = 1;  // of kv_gen with this many blocks:
  std::uint32_t late_n = 0;

  std::vector<ProfileTimes::StageSpan> spans(const messages::IterationT& tables,
                                             const DeviceLimits& limits) const {
    std::vector<ProfileTimes::StageSpan> spans;
    std::int64_t now = 1000;
    const auto add = [&](SpanKind kind, int stream, std::uint32_t batch, Seconds time) {
      const auto ns = std::llround(time.n * 1e9);
      spans.push_back({1, messages::Span(kind, static_cast<std::uint8_t>(stream), 0, batch, 0, 0,
                                         now, now + ns)});
      now += ns;
    };
    double rows = 0;
    for (std::size_t i = 0; i < tables.mini_batches.size(); ++i) {
      const auto& batch = *tables.mini_batches[i];
      const auto id = static_cast<std::uint32_t>(i);
      double blocks = 0, pairs = 0;
      bool kv = false, here = false;
      for (const auto& run : batch.loads) {
        blocks += run.count() - 1 + run.tail_tokens() / 16.0;
        kv = run.kind() == messages::Kind::Kv;
        here = run.place() == messages::Place::Gpu;
      }
      if (blocks > 0) {
        add(SpanKind::Load, here ? 2 : 0, id,
            here ? costs.load_here(blocks)
            : kv ? costs.load_kv(blocks)
                 : costs.load_act(blocks));
      }
      for (const auto& range : batch.regenerate) {
        add(SpanKind::KvGen, 1, id,
            costs.kv_gen(range.count()) * (range.count() == late_n ? late : 1));
      }
      for (const auto& sequence : batch.sequences) {
        pairs += prefill_pairs(sequence);
      }
      const auto entries = double(batch.entries.size());
      const bool absorbed = batch.entries[0].where() == messages::Where::Activation;
      add(SpanKind::Attention, 1, id,
          pairs > 0  ? costs.prefill(pairs)
          : absorbed ? costs.absorb_of(entries, double(batch.tokens.size()))
                     : costs.attention(entries));
      rows += double(batch.tokens.size());
      const bool ends =
          i + 1 == tables.mini_batches.size() ||
          rows + double(tables.mini_batches[i + 1]->tokens.size()) > limits.max_mini_batch_rows;
      if (ends) {
        add(SpanKind::Qkv, 1, id, costs.qkv(rows));
        add(SpanKind::Fc2, 1, id, costs.forward(rows) - costs.qkv(rows));
        rows = 0;
      }
    }
    return spans;
  }
};

struct Measuring {
  ModelShape shape = opt_shape("opt-6.7b");
  ProfileSizes sizes = sizes_of("opt-6.7b");
  ProfileTimes times{weight_layout(shape, DType::float16), sizes.device};
  std::uint64_t iteration = 0;

  void go(const Exact& machine) {
    for (const ProfileWork work : kProfileWork) {
      const auto tables = profile_iteration(work, sizes, shape, ++iteration, 1, 0, 3);
      times.add(work, tables, machine.spans(tables, sizes.device));
    }
  }
};

Exact some_machine() {
  Exact machine{.costs =
                    profile_of(machine_named("l4-pcie4"), opt_shape("opt-6.7b"), DType::float16)};
  double a = 1e-6;
  for (const ProfileLine& line : profile_lines()) {
    (machine.costs.*line.line).a = a += 2e-6;
  }
  return machine;
}

TEST(ProfileTimes, GiveTheLinesBackThatTheyCameFrom) {
  const Exact machine = some_machine();
  Measuring measuring;
  measuring.go(machine);
  Profile found;
  measuring.times.fit(found);
  for (const auto line :
       {&Profile::load_kv, &Profile::load_act, &Profile::load_here, &Profile::kv_gen,
        &Profile::attention, &Profile::prefill, &Profile::forward, &Profile::qkv}) {
    EXPECT_NEAR((found.*line).a, (machine.costs.*line).a, 1e-7);
    EXPECT_NEAR((found.*line).b, (machine.costs.*line).b, 1e-3 * (machine.costs.*line).b);
    EXPECT_GT((found.*line).r2, 0.999999);
  }
  EXPECT_TRUE(measuring.times.outliers().empty());
  const auto& rows = found.forward.points;
  EXPECT_EQ(rows.front().n, 8) << "not the single row between large prompts";
  EXPECT_EQ(std::ranges::count_if(rows, [](const Point& point) { return point.n >= 1024; }), 9)
      << "every 128 rows";
  for (const MeasuredLine& line : found.measured) {
    EXPECT_GE(line.points.size(), 6u) << line.name;
  }
}

// Rows of one block give the one line; the other is what their own part leaves of the times of many blocks.
TEST(ProfileTimes, OfActivationsThatAreAttendedAreOfRowsAndOfBlocks) {
  const ModelShape shape = opt_shape("opt-6.7b");
  for (const ProfileScale scale : {kFirstProfileScale, ProfileScale{56, 136}, kLargestProfileScale}) {
    const ProfileSizes sizes = profile_sizes(shape, DType::float16, scale, kGiB * 2, kGiB, kGiB * 24,
                                             KvFormat::plain, Bytes{0}, true);
    ASSERT_TRUE(sizes.device.absorption);
    const Exact machine = some_machine();
    ProfileTimes times(weight_layout(shape, DType::float16), sizes.device);
    const auto tables =
        profile_iteration(ProfileWork::context_absorbed, sizes, shape, 1, 1, 0, 3);
    for (const auto& batch : tables.mini_batches) {
      EXPECT_TRUE(batch->regenerate.empty());
      EXPECT_LE(std::ssize(batch->entries), sizes.device.act_slots);
      EXPECT_LE(std::ssize(batch->sequences), sizes.device.max_sequences);
    }
    times.add(ProfileWork::context_absorbed, tables, machine.spans(tables, sizes.device));
    Profile found;
    times.fit(found);
    EXPECT_EQ(found.measured.size(), 2u) << "nothing else is disturbed by it";
    for (const auto line : {&Profile::absorb_rows, &Profile::absorb}) {
      EXPECT_NEAR((found.*line).b, (machine.costs.*line).b, 1e-2 * (machine.costs.*line).b);
      EXPECT_EQ(measures(ProfileWork::context_absorbed, line), true);
      EXPECT_EQ(measures(ProfileWork::context_apart, line), false);
    }
    const double rows = sizes.absorbing_rows, blocks = 2 * rows;
    EXPECT_NEAR(found.absorb_of(blocks, rows).n, machine.costs.absorb_of(blocks, rows).n,
                1e-2 * machine.costs.absorb_of(blocks, rows).n);
  }
  EXPECT_EQ(sizes_of("opt-6.7b").absorbing_rows, 0);
}

TEST(ProfileTimes, ThatLieFarOffAreForgottenAndMeasuredAgain) {
  Exact machine = some_machine();
  machine.late = 3;
  machine.late_n = 144;
  Measuring measuring;
  measuring.go(machine);
  const auto outliers = measuring.times.outliers();
  ASSERT_EQ(outliers.size(), 1u);
  EXPECT_EQ(outliers[0].first, &Profile::kv_gen);
  EXPECT_EQ(outliers[0].second, 144);
  EXPECT_TRUE(measures(ProfileWork::context_busy, outliers[0].first));
  EXPECT_FALSE(measures(ProfileWork::prompts_kv, outliers[0].first));
  measuring.times.forget(outliers);
  machine.late = 1;
  measuring.go(machine);
  Profile found;
  measuring.times.fit(found);
  EXPECT_NEAR(found.kv_gen.b, machine.costs.kv_gen.b, 1e-3 * machine.costs.kv_gen.b);
  EXPECT_TRUE(measuring.times.outliers().empty());
  const auto line = std::ranges::find(found.measured, "kv_gen", &MeasuredLine::name);
  ASSERT_NE(line, found.measured.end());
  EXPECT_EQ(line->remeasured, 1);
}

TEST(ProfileTimes, BetweenIterationsIsTheRestInTheMiddle) {
  ProfileTimes times({}, {});
  for (const double rest : {7e-6, 9e-3, 5e-6}) {
    times.add_between({rest});
  }
  Measuring measuring;
  Profile found;
  measuring.times.fit(found);
  EXPECT_EQ(found.between.n, 0);
  times.fit(found);
  EXPECT_EQ(found.between.n, 7e-6);
}

// Beside the link counts what host cores attended while it was never idle, and none of what they disturbed.
TEST(ProfileTimes, OfHostCoresAreThoseAloneAndThoseBesideABusyLink) {
  const ModelShape shape = opt_shape("opt-6.7b");
  const ProfileSizes sizes = profile_sizes(shape, DType::float16, kLargestProfileScale, kGiB * 2,
                                           kGiB, kGiB * 24, KvFormat::plain, kGiB * 6);
  ProfileTimes times(weight_layout(shape, DType::float16), sizes.device);
  constexpr std::int64_t kMs = 1'000'000;
  const auto add = [&](ProfileWork work, std::int64_t first, std::int64_t second) {
    const auto tables = profile_iteration(work, sizes, shape, 1, 1, 0, 3);
    const auto last = static_cast<std::uint32_t>(tables.mini_batches.size() - 1);
    std::vector<ProfileTimes::StageSpan> spans{
        {1, messages::Span(SpanKind::HostAttention, 3, 0, last - 5, 0, 0, 0, first * kMs)},
        {1, messages::Span(SpanKind::HostAttention, 3, 0, last - 4, 0, 0, first * kMs,
                           (first + second) * kMs)}};
    if (work == ProfileWork::context_host_link) {
      spans.push_back({1, messages::Span(SpanKind::Load, 0, 0, 0, 0, 0, 0, 6 * kMs)});
      spans.push_back({1, messages::Span(SpanKind::Load, 0, 0, 1, 0, 0, 6 * kMs, 9 * kMs)});
      spans.push_back({1, messages::Span(SpanKind::Load, 0, 0, 2, 0, 0, 20 * kMs, 90 * kMs)});
    }
    times.add(work, tables, spans);
  };
  add(ProfileWork::context_host, 6, 4);
  add(ProfileWork::context_host_link, 9, 5);  // 9 ms of 9, then none of 5
  const auto apart = profile_iteration(ProfileWork::context_apart, sizes, shape, 1, 1, 0, 3);
  times.add(ProfileWork::context_apart, apart,
            {{1, messages::Span(SpanKind::Load, 0, 0, 0, 0, 0, 0, 4 * kMs)},
             {1, messages::Span(SpanKind::Load, 0, 0, 2, 0, 0, 4 * kMs, 5 * kMs)}});
  Profile found;
  found.kind = DeviceKind::cuda;
  times.fit(found);
  const auto line = std::ranges::find(found.measured, "host_attention", &MeasuredLine::name);
  ASSERT_NE(line, found.measured.end());
  ASSERT_EQ(line->alone.size(), 2u);
  EXPECT_DOUBLE_EQ(line->alone[0].time.n, 4e-3);
  EXPECT_DOUBLE_EQ(line->alone[1].time.n, 6e-3);
  ASSERT_EQ(line->points.size(), 2u);
  EXPECT_DOUBLE_EQ(line->points[0].time.n, 4e-3) << "nothing of it was beside the link";
  EXPECT_DOUBLE_EQ(line->points[1].time.n, 9e-3);
  ASSERT_TRUE(found.host_attention_undisturbed);
  EXPECT_DOUBLE_EQ(found.host_alone(line->points[1].n).n, 6e-3);
  const auto loads = std::ranges::find(found.measured, "load_kv", &MeasuredLine::name);
  ASSERT_NE(loads, found.measured.end());
  EXPECT_EQ(loads->points.size(), 1u) << "what host cores disturb is none";
  EXPECT_DOUBLE_EQ(found.kv_slowdown, 6 / 4.0) << "not that beside which host cores rested";
  EXPECT_DOUBLE_EQ(found.act_slowdown, 3 / 1.0);
  for (const ProfileLine& one : profile_lines()) {
    const std::string name = one.name;
    EXPECT_EQ(measures(ProfileWork::context_host_link, one.line),
              name.starts_with("host_") || name.ends_with("_beside_host"))
        << name;
  }
}

// As a file may have it.
TEST(ProfileTimes, NothingMeasuredBesideHostCoresSlowsNoLink) {
  Profile profile;
  profile.kind = DeviceKind::cuda;
  profile.measured.push_back({.name = "load_beside_host"});
  complete(profile);
  EXPECT_EQ(profile.kv_slowdown, 1);
  EXPECT_EQ(profile.act_slowdown, 1);
  profile.load_beside_host.points = {{.n = 8, .time = {1e-3}}};  // and load_kv takes no time
  complete(profile);
  EXPECT_EQ(profile.kv_slowdown, 1);
  profile.load_kv.b = 1e-4;
  complete(profile);
  EXPECT_DOUBLE_EQ(profile.kv_slowdown, 1.25);
  EXPECT_DOUBLE_EQ(profile.act_slowdown, 1.25) << "what was not measured is as the other";
  std::swap(profile.load_beside_host, profile.load_act_beside_host);
  profile.load_act.b = 5e-5;
  complete(profile);
  EXPECT_DOUBLE_EQ(profile.act_slowdown, 2.5);
  EXPECT_DOUBLE_EQ(profile.kv_slowdown, 2.5);
}

// As on a device of set speeds, whose host was late once.
TEST(ProfileTimes, CountWhatBeginsAtOnceBesideWhatBeginsLate) {
  Measuring measuring;
  const auto tables = profile_iteration(ProfileWork::context_together, measuring.sizes,
                                        measuring.shape, 1, 1, 0, 3);
  std::vector<ProfileTimes::StageSpan> spans{
      {0, messages::Span(SpanKind::Tables, 0, 0, 0, 0, 0, 0, 50)}};
  for (std::uint32_t batch = 0; batch < 4; ++batch) {
    const std::uint64_t loaded = 1'000 * (batch + 1), begin = loaded + (batch == 2 ? 300 : 0);
    spans.push_back({1, messages::Span(SpanKind::Load, 0, 0, batch, 0, 0, loaded - 500, loaded)});
    spans.push_back(
        {1, messages::Span(SpanKind::Attention, 1, 0, batch, 0, 0, begin, begin + 200)});
  }
  measuring.times.add(ProfileWork::context_together, tables, spans);
  Profile found;
  found.event_latency = {1};
  measuring.times.fit(found);
  EXPECT_EQ(found.event_latency.n, 0);
}

TEST(ProfileTimes, SayHowLateWhatWaitsForAnotherStreamBegins) {
  Measuring measuring;
  const auto tables = profile_iteration(ProfileWork::context_together, measuring.sizes,
                                        measuring.shape, 1, 1, 0, 3);
  const auto span = [](std::uint32_t stage, SpanKind kind, std::uint8_t stream, std::uint32_t batch,
                       std::int64_t begin_us, std::int64_t end_us) {
    return ProfileTimes::StageSpan{
        stage, messages::Span(kind, stream, 0, batch, 0, 0, begin_us * 1'000, end_us * 1'000)};
  };
  measuring.times.add(
      ProfileWork::context_together, tables,
      {span(0, SpanKind::Tables, 0, 0, 0, 50), span(1, SpanKind::Load, 0, 0, 50, 200),
       span(1, SpanKind::Qkv, 1, 0, 90, 120),
       span(1, SpanKind::Attention, 1, 0, 203, 400),  // 3 behind its blocks
       span(1, SpanKind::Load, 0, 1, 200, 300),
       span(1, SpanKind::Attention, 1, 1, 450, 500),  // they were there
       span(1, SpanKind::Load, 0, 2, 300, 600), span(1, SpanKind::Load, 2, 2, 300, 650),
       span(1, SpanKind::KvGen, 1, 2, 655, 700),  // 5 behind the later ones
       span(1, SpanKind::Attention, 1, 2, 800, 900), span(1, SpanKind::Load, 0, 3, 600, 1000),
       span(1, SpanKind::Attention, 1, 3, 1005, 1100), span(33, SpanKind::Head, 1, 0, 1100, 1200),
       span(33, SpanKind::Results, 2, 0, 1203, 1300)});
  Profile found;
  measuring.times.fit(found);
  EXPECT_NEAR(found.event_latency.n, 5e-6, 1e-12) << "the median of 3, 5 and 5";
  double rows = 0, samples = 0;
  for (const auto& batch : tables.mini_batches) {
    rows += static_cast<double>(batch->tokens.size());
    samples += static_cast<double>(batch->samples.size());
  }
  EXPECT_NEAR(found.tables(rows).n, 50e-6, 1e-12);
  EXPECT_NEAR(found.results(samples).n, 97e-6, 1e-12);
}

TEST(FarPoints, AreThoseFarFromTheLineOfAllOthers) {
  std::vector<Point> points;
  for (int n = 1; n <= 9; ++n) {
    points.push_back({double(n), {n * 1e-3 * (n % 2 == 0 ? 1.01 : 0.99)}});
  }
  EXPECT_TRUE(far_points(points).empty());
  points[6].time.n *= 1.5;
  EXPECT_EQ(far_points(points), std::vector<std::size_t>{6});
}

TEST(ProfileScale, ShrinksForASlowMachine) {
  Profile fast = profile_of(machine_named("h200-pcie5"), opt_shape("opt-1.3b"), DType::float16);
  Profile slow = fast;
  for (const ProfileLine& line : profile_lines()) {
    (slow.*line.line).b *= 1e4;
  }
  const ProfileScale large = profile_scale(fast, 24, {1}), small = profile_scale(slow, 24, {1});
  EXPECT_GT(large.blocks, small.blocks);
  EXPECT_GT(large.rows, small.rows);
  EXPECT_GE(small.blocks, kFirstProfileScaleOnGpu.blocks);
  EXPECT_LE(large.rows, kLargestProfileScale.rows);
}

// Where a mini-batch has fewer rows than its blocks, keys and values of codes are made in many small products.
TEST(ProfileScale, OfASlowGpuHasRoomForTheKeysOfItsBlocksAndAllBlocksOfHostCores) {
  Profile slow = profile_of(machine_named("h200-pcie5"), opt_shape("opt-1.3b"), DType::float16);
  for (const ProfileLine& line : profile_lines()) {
    (slow.*line.line).b *= 1e4;
  }
  const ProfileScale on_gpu = profile_scale(slow, 24, {1});
  EXPECT_GE(on_gpu.rows, on_gpu.blocks * kBlockTokens);
  EXPECT_EQ(on_gpu.host_blocks, kLargestProfileScale.host_blocks);
  slow.kind = DeviceKind::cpu;
  const ProfileScale on_cpu = profile_scale(slow, 24, {1});
  EXPECT_EQ(on_cpu.blocks, kFirstProfileScale.blocks);
  EXPECT_EQ(on_cpu.host_blocks, 0);
}

// A link that is done before host cores would show these alone.
TEST(ProfileIteration, LoadsLastLongerThanHostCoresAttend) {
  for (const std::int32_t blocks : {32, 72, 112, 184, 232, 576}) {
    const ProfileScale scale{blocks, 512, kLargestProfileScale.host_blocks};
    const ProfileSizes sizes = profile_sizes(opt_shape("opt-6.7b"), DType::float16, scale, kGiB * 2,
                                             kGiB, kGiB * 24, KvFormat::plain, kGiB * 32);
    const auto tables = profile_iteration(ProfileWork::context_host_link, sizes,
                                          opt_shape("opt-6.7b"), 1, 1, 0, 3);
    std::int64_t attended = 0, kv = 0, act = 0, waited_for = 0;
    for (const auto& batch : tables.mini_batches) {
      const auto& first = batch->entries[0];
      const bool on_host = first.where() == messages::Where::HostInPlace;
      (on_host ? attended : waited_for) += std::ssize(batch->entries);
      for (const auto& run : batch->loads) {
        (first.kind() == messages::Kind::Kv ? kv : act) += run.count();
      }
    }
    EXPECT_GT(attended, 400);
    EXPECT_GE(kv + act, 2 * attended) << blocks;
    EXPECT_GE(kv, act) << blocks;
    EXPECT_LE(kv - act, blocks) << blocks;
    EXPECT_LE(4 * waited_for, kv + act) << "the device has little to do for what is loaded";
  }
}

}  // namespace
}  // namespace poise
