#include "planner/memory/sizes.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "common/trouble.h"
#include "planner/schedule/block_table.h"

namespace poise {
namespace {

ModelShape small_shape() {
  return {.num_hidden_layers = 6,
          .hidden_size = 128,
          .ffn_dim = 512,
          .num_attention_heads = 4,
          .num_key_value_heads = 4,
          .head_dim = 32,
          .vocab_size = 1000,
          .max_position_embeddings = 2048,
          .position_offset = 2,
          .word_embed_proj_dim = 128,
          .do_layer_norm_before = 1,
          .qkv_bias = 1,
          .output_bias = 1,
          .mlp_bias = 1,
          .layer_norm_elementwise_affine = 1,
          .has_final_layer_norm = 1,
          .tie_word_embeddings = 1,
          .learned_positions = 1};
}

Request request(std::uint32_t line, std::size_t prompt, std::int32_t max_tokens) {
  Request r;
  r.id = {line};
  r.prompt = std::vector<TokenId>(prompt, 1);
  r.sampling.max_tokens = max_tokens;
  return r;
}

Demand demand(const std::vector<Request>& requests, std::int32_t max_num_seqs) {
  std::vector<const Request*> all;
  for (const Request& r : requests) {
    all.push_back(&r);
  }
  return demand_of(all, max_num_seqs);
}

BlockBudget roomy() { return {.weights = kMiB * 2, .available = kGiB * 8, .host_memory = {}}; }

// 32,768 tokens of context in a window of 4,096: between iterations 257 blocks a request, and twice as many while a
// part of its prompt runs.
TEST(Demand, IsOfTheWindowWhereAllLayersHaveOne) {
  const std::vector<RequestSize> requests(
      8, {.id = {1}, .prompt = 30'000, .answer = 2'769});
  const KeptContext kept{.window = 4096};
  const Demand whole = demand_of(requests, 4), windowed = demand_of(requests, 4, kept, 8192);
  EXPECT_EQ(whole.most_blocks, 4 * 2048);
  EXPECT_EQ(windowed.most_blocks, 4 * 257 + 512);
  EXPECT_EQ(windowed.largest_request, 513);
  EXPECT_EQ(windowed.longest_context, 32'768);
  EXPECT_EQ(windowed.most_tokens, 4 * 32'768);
  EXPECT_EQ(demand_of(requests, 1, kept, 8192).most_blocks, 513);
  const std::vector<RequestSize> small(8, {.id = {1}, .prompt = 1'000, .answer = 100});
  EXPECT_EQ(demand_of(small, 4, kept, 8192).most_blocks, demand_of(small, 4).most_blocks);
}

TEST(Demand, IsThatOfTheLargestRequestsUnderWayAtOnce) {
  const std::vector<Request> requests{request(1, 16, 1), request(2, 100, 50), request(3, 33, 0),
                                      request(4, 17, 16)};
  const Demand two = demand(requests, 2);
  EXPECT_EQ(two.sequences, 2);
  EXPECT_EQ(two.longest_context, 149);
  EXPECT_EQ(two.largest_request, 10);
  EXPECT_EQ(two.largest, RequestId{2});
  EXPECT_EQ(two.most_blocks, 10 + 3);
  EXPECT_EQ(two.most_prompt_rows, 100 + 33);
  EXPECT_EQ(demand(requests, 9).sequences, 4);
  EXPECT_EQ(demand(requests, 9).most_blocks, 1 + 10 + 3 + 2);
}

TEST(BlockBudgets, AreTheLeastOfTheUsersCapAndTheMachine) {
  BlockBudget budget{.weights = kGiB * 2, .available = kGiB * 4, .host_memory = kGiB * 3};
  EXPECT_EQ(bytes_for_blocks(budget), kGiB);  // the cap counts the weights too
  budget.host_memory = kGiB * 1000;
  EXPECT_LT(bytes_for_blocks(budget), kGiB * 4);
  EXPECT_GT(bytes_for_blocks(budget), kGiB * 3);
  budget.device_in_host = kGiB * 3;
  EXPECT_LT(bytes_for_blocks(budget), kGiB);
  budget.host_memory = kGiB;
  EXPECT_EQ(bytes_for_blocks(budget), Bytes{0});
}

TEST(HostAllocation, HoldsAllRequestsWhereThereIsRoom) {
  const std::vector<Request> requests{request(1, 100, 50), request(2, 200, 50)};
  const Demand of = demand(requests, 8);
  for (const char* policy : {"kv-only", "act-only", "hybrid"}) {
    const Allocation host =
        allocate_host(*make_policy(policy, {}), small_shape(), DType::float16, of, {}, roomy());
    EXPECT_EQ(host.act_blocks + host.kv_blocks, of.most_blocks) << policy;
  }
}

TEST(HostAllocation, FailsWithNumbersWhereTheLargestRequestDoesNotFit) {
  const std::vector<Request> requests{request(7, 2000, 40)};
  BlockBudget budget = roomy();
  budget.host_memory = kMiB * 4;
  try {
    allocate_host(*make_policy("kv-only", {}), small_shape(), DType::float16, demand(requests, 8),
                  {}, budget);
    FAIL() << "it was accepted";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.code(), Exit::cannot_start);
    EXPECT_NE(std::string(failure.what()).find("line 7"), std::string::npos) << failure.what();
    EXPECT_NE(std::string(failure.what()).find("2039 tokens"), std::string::npos);
  }
}

TEST(HostAllocation, FitsItsRegion) {
  const BlockSizes sizes = block_sizes(small_shape(), DType::float16, KvFormat::plain);
  for (std::uint32_t act = 0; act < 30; act += 7) {
    const Allocation host{.act_blocks = act, .kv_blocks = 31 - act};
    const PoolPartition partition{.region_bytes = region_bytes(sizes, host),
                                  .act_blocks = host.act_blocks,
                                  .kv_blocks = host.kv_blocks};
    EXPECT_TRUE(partition.fits(sizes));
    EXPECT_EQ(partition.region_bytes % 4096, 0u);
  }
}

TEST(DeviceBuffers, AreNoLargerThanTheRequestsCanUse) {
  const std::vector<Request> requests{request(1, 20, 10), request(2, 30, 3)};
  const Demand of = demand(requests, 256);
  const DeviceLimits limits = choose_device_limits(
      small_shape(), DType::float32, of, {.act_blocks = 0, .kv_blocks = 4}, {}, Bytes{0}, kGiB);
  EXPECT_EQ(limits.resident_layers, 6);
  EXPECT_EQ(limits.act_slots, 0);
  EXPECT_EQ(limits.kv_slots, 4);
  EXPECT_EQ(limits.max_rows, 50 + 2);
  EXPECT_EQ(limits.max_context, 32);
}

TEST(DeviceBuffers, ShrinkUntilTheyFitAndHoldTheLargestRequestAlways) {
  std::vector<Request> requests;
  for (std::uint32_t i = 1; i <= 64; ++i) {
    requests.push_back(request(i, 200 + i, 300));
  }
  const Demand of = demand(requests, 64);
  const Allocation host{.act_blocks = 1000, .kv_blocks = 1000};
  const auto with_cap = [&](Bytes cap) {
    return choose_device_limits(small_shape(), DType::float32, of, host, {}, Bytes{0}, cap);
  };
  std::int32_t rows_before = 1 << 30;
  bool failed = false;
  for (Bytes cap = kMiB * 256; cap > kMiB; cap = cap * 3 / 4) {
    DeviceLimits limits;
    try {
      limits = with_cap(cap);
    } catch (const Failure&) {
      failed = true;
      continue;
    }
    EXPECT_FALSE(failed) << "a smaller cap succeeded where a larger one did not";
    EXPECT_LE(plan_device_memory(small_shape(), DType::float32, limits, Bytes{0}).total, cap);
    EXPECT_GE(limits.kv_slots, of.largest_request);
    EXPECT_GE(limits.act_slots, of.largest_request);
    EXPECT_LE(limits.max_mini_batch_rows, rows_before);
    rows_before = limits.max_mini_batch_rows;
    const ScheduleLimits schedule = schedule_limits({}, of, host, limits);
    const PackLimits pack = pack_limits({}, limits);
    EXPECT_LE(schedule.sequence_rows, pack.rows);
    EXPECT_GT(schedule.prefill_rows, 0);
    EXPECT_LE(schedule.prefill_rows + schedule.max_num_seqs, limits.max_rows);
  }
  EXPECT_TRUE(failed) << "no cap was too small";
  EXPECT_LT(rows_before, with_cap(kGiB).max_mini_batch_rows);
}

TEST(ActBlocksOnTheDevice, TakeWhatTheCapLeavesAndTheHostHasSoManyFewer) {
  std::vector<Request> requests;
  for (std::uint32_t i = 1; i <= 64; ++i) {
    requests.push_back(request(i, 200 + i, 300));
  }
  const Demand of = demand(requests, 64);
  const auto all = static_cast<std::uint32_t>(of.most_blocks);
  const Bytes overhead = kMiB;
  std::int32_t here_before = 0;
  for (Bytes cap = kMiB * 24; cap <= kMiB * 512; cap = cap * 2) {
    const auto [host, device] = place_blocks(
        small_shape(), DType::float32, of, {.act_blocks = all, .kv_blocks = 0}, {}, overhead, cap);
    EXPECT_LE(plan_device_memory(small_shape(), DType::float32, device, overhead).total, cap);
    EXPECT_EQ(host.gpu_act_blocks, static_cast<std::uint32_t>(device.gpu_act_blocks));
    EXPECT_EQ(host.act_blocks, std::max(1u, all - host.gpu_act_blocks)) << "a pool has a block";
    EXPECT_GE(device.gpu_act_blocks, here_before);
    if (device.gpu_act_blocks < static_cast<std::int32_t>(all)) {  // not one more would fit
      DeviceLimits more = device;
      ++more.gpu_act_blocks;
      EXPECT_GT(
          plan_device_memory(small_shape(), DType::float32, more, overhead).total + Bytes{512},
          cap);
    }
    here_before = device.gpu_act_blocks;
  }
  EXPECT_EQ(here_before, static_cast<std::int32_t>(all));
}

TEST(ActBlocksOnTheDevice, AreNoneWhereThePolicyWantsNone) {
  const std::vector<Request> requests{request(1, 20, 10)};
  const auto [host, device] = place_blocks(small_shape(), DType::float32, demand(requests, 4),
                                           {.act_blocks = 0, .kv_blocks = 2}, {}, Bytes{0}, kGiB);
  EXPECT_EQ(host, (Allocation{.kv_blocks = 1, .gpu_kv_blocks = 2}));  // a pool has a block
  EXPECT_EQ(device.gpu_kv_blocks, 2);
  EXPECT_EQ(device.gpu_act_blocks, 0);
}

// As after a swap to keys and values where the host's pool is of one ACT block, half as large.
TEST(Placement, OfABudgetWithoutABlockHasTheDevicesBlocks) {
  const std::vector<Request> requests{request(1, 200, 100), request(2, 100, 20)};
  const Demand of = demand(requests, 2);
  const FixedPlacement standing{.resident_layers = 1, .gpu_act_blocks = 25, .gpu_kv_blocks = 24};
  const auto [host, device] =
      place_blocks(small_shape(), DType::float32, of, {}, {}, kMiB, kGiB, standing);
  EXPECT_EQ(host.gpu_act_blocks, 25u);
  EXPECT_EQ(host.gpu_kv_blocks, 24u);
  EXPECT_EQ(host.act_blocks, 0u);
  EXPECT_EQ(host.kv_blocks, 1u) << "a pool has a block";
  EXPECT_EQ(device.gpu_act_blocks, 25);
  EXPECT_EQ(device.gpu_kv_blocks, 24);
  EXPECT_GE(device.act_slots, of.largest_request);
  EXPECT_GE(device.kv_slots, of.largest_request);
}

TEST(Placement, OfAnyPolicyStaysWithinBothMemories) {
  int placed = 0, refused = 0;
  for (std::uint32_t seed = 1; seed <= 600; ++seed) {
    std::mt19937 random(seed);
    const auto one_of = [&](std::uint32_t n) { return static_cast<std::int32_t>(random() % n); };
    ModelShape shape = small_shape();
    shape.num_hidden_layers = 1 + one_of(6);
    shape.num_key_value_heads = one_of(2) == 0 ? shape.num_attention_heads : 1;
    std::vector<Request> requests;
    for (std::uint32_t i = 1; i <= 1 + static_cast<std::uint32_t>(one_of(40)); ++i) {
      requests.push_back(request(i, 1 + static_cast<std::size_t>(one_of(300)), 1 + one_of(200)));
    }
    const PolicyEntry& entry = policies()[random() % policies().size()];
    SCOPED_TRACE(testing::Message() << "seed " << seed << ' ' << entry.name);
    const auto profile = std::make_shared<const Profile>(
        profile_of(machines()[random() % machines().size()], shape, DType::float32));
    PolicyOptions options{.profile = profile};
    if (std::string_view(entry.name) == "hybrid" && one_of(2) == 0) {
      options.act_share = one_of(11) / 10.0;
    }
    const auto policy = make_policy(entry.name, options);
    const Demand of = demand(requests, 1 + one_of(one_of(2) == 0 ? 2 : 40));
    const BlockBudget budget{
        .weights = kMiB, .available = kMiB * (66 + one_of(60)), .host_memory = {}};
    const DeviceMemory memory{.cap = kMiB * (4 + one_of(60)), .overhead = kMiB};
    try {
      const Allocation wished =
          allocate_host(*policy, shape, DType::float32, of, {}, budget, memory);
      const auto [host, device] =
          place_blocks(shape, DType::float32, of, wished, {}, memory.overhead, memory.cap);
      const BlockSizes sizes = block_sizes(shape, DType::float32, KvFormat::plain);
      EXPECT_LE(
          Bytes{static_cast<std::int64_t>(region_bytes(sizes, host))} * shape.num_hidden_layers,
          bytes_for_blocks(budget));
      EXPECT_LE(plan_device_memory(shape, DType::float32, device, memory.overhead).total,
                memory.cap);
      EXPECT_EQ(static_cast<std::uint32_t>(device.gpu_act_blocks), host.gpu_act_blocks);
      EXPECT_EQ(static_cast<std::uint32_t>(device.gpu_kv_blocks), host.gpu_kv_blocks);
      EXPECT_GE(host.all_act_blocks() + host.all_kv_blocks() + host.token_blocks,
                of.largest_request);
      // Whatever the policy gives a request, its mini-batch holds it alone.
      EXPECT_GE(device.act_slots,
                std::min<std::int64_t>(host.all_act_blocks(), of.largest_request));
      EXPECT_GE(device.kv_slots, std::min<std::int64_t>(host.all_kv_blocks(), of.largest_request));
      ++placed;
    } catch (const Failure&) {
      ++refused;  // too little of one of them, in words
    }
  }
  EXPECT_GT(placed, 150);
  EXPECT_GT(refused, 3);
}

TEST(DeviceBuffers, ResidentLayersAreThePolicysWhereItSaysSo) {
  const std::vector<Request> requests{request(1, 20, 10)};
  const DeviceLimits limits = choose_device_limits(
      small_shape(), DType::float32, demand(requests, 4),
      {.act_blocks = 0, .kv_blocks = 4, .resident_layers = 2}, {}, Bytes{0}, kGiB);
  EXPECT_EQ(limits.resident_layers, 2);
}

// A product of 132 multiprocessors, whose last round is as long with one tile as with all.
Profile stepped_profile(double per_step, double from, double to) {
  Profile profile;
  for (double n = from; n <= to; n += 8) {
    profile.kv_gen.points.push_back({n, {std::ceil(n / per_step) * 51e-6}});
  }
  profile.kv_gen.b = 51e-6 / per_step;
  return profile;
}

TEST(MiniBatch, HasOneSizeHoweverOftenItIsAsked) {
  Profile profile = stepped_profile(33, 392, 576);
  profile.kv_gen.points = {{300, {300e-6}}, {390, {390 * 1.1e-6}}, {512, {512 * 1.5e-6}}};
  const BatchOptions once = with_mini_batch({.by_profile = true}, &profile);
  EXPECT_EQ(once.mini_batch_tokens, 390 * kBlockTokens);
  EXPECT_EQ(with_mini_batch(once, &profile).mini_batch_tokens, 390 * kBlockTokens);
}

TEST(MiniBatch, HasTheSizeThatRegeneratesForLeastABlock) {
  const BatchOptions free{.by_profile = true};
  const Profile full = stepped_profile(33, 392, 576);
  EXPECT_EQ(with_mini_batch(free, &full).mini_batch_tokens, 528 * kBlockTokens);
  const Profile even = stepped_profile(8, 392, 576);
  EXPECT_EQ(with_mini_batch(free, &even).mini_batch_tokens, 8192) << "none is better";
  const Profile small = stepped_profile(33, 8, 128);
  EXPECT_EQ(with_mini_batch(free, &small).mini_batch_tokens, 8192) << "too small";
  EXPECT_EQ(with_mini_batch(free, nullptr).mini_batch_tokens, 8192);
  Profile far = full;  // of a file that says anything
  far.kv_gen.points.push_back({1e12, {1e-3}});
  EXPECT_EQ(with_mini_batch(free, &far).mini_batch_tokens, 528 * kBlockTokens) << "too large";
  EXPECT_EQ(with_mini_batch({.mini_batch_tokens = 4096}, &full).mini_batch_tokens, 4096)
      << "as the user says";
}

}  // namespace
}  // namespace poise
