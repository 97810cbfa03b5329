#include "planner/sizes.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "common/trouble.h"
#include "planner/allocation.h"
#include "planner/block_table.h"

namespace poise {
namespace {

constexpr std::int32_t kMiniBatchRows = 2048;  // where the products have reached their speed
constexpr std::int32_t kLogitsRows = 256;
constexpr Bytes kHostReserve =
    kMiB * 64;  // for messages, tables, results, the processes themselves

double mib(Bytes bytes) { return static_cast<double>(bytes.n) / static_cast<double>(kMiB.n); }

std::int64_t sum_of_largest(std::vector<std::int32_t> sizes, std::int32_t count) {
  const auto end = sizes.begin() + std::min<std::ptrdiff_t>(count, std::ssize(sizes));
  std::nth_element(sizes.begin(), end == sizes.begin() ? end : end - 1, sizes.end(),
                   std::greater<>());
  std::int64_t sum = 0;
  for (auto size = sizes.begin(); size != end; ++size) {
    sum += *size;
  }
  return sum;
}

std::int32_t smaller(std::int32_t wanted, int halvings, std::int32_t least) {
  return std::max(wanted >> halvings, std::min(wanted, least));
}

// Slots of one kind's buffers: its share of the mini-batch, and at least what one request may have
// of the kind. Never more than there are blocks.
std::int32_t slots_of(std::uint32_t blocks, double share, std::int32_t total,
                      std::int32_t largest_request) {
  const auto wanted =
      std::max<std::int64_t>(static_cast<std::int64_t>(std::ceil(share * total)), largest_request);
  return static_cast<std::int32_t>(std::min<std::int64_t>(wanted, blocks));
}

DeviceLimits limits_after(int halvings, const Demand& demand, const Allocation& host,
                          const BatchOptions& options) {
  const auto prompts = static_cast<std::int32_t>(std::min<std::int64_t>(
      options.prefill_tokens, std::max<std::int64_t>(demand.most_prompt_rows, 1)));
  const std::int32_t prefill = smaller(prompts, halvings, kBlockTokens);
  const std::int32_t rows = smaller(std::min(std::max(prompts, demand.sequences), kMiniBatchRows),
                                    halvings, kBlockTokens);
  const std::int64_t tokens = smaller(options.mini_batch_tokens, halvings, kBlockTokens);
  const auto slots = static_cast<std::int32_t>(std::max<std::int64_t>(
      std::min(tokens / kBlockTokens, demand.most_blocks), demand.largest_request));
  const double all = static_cast<double>(host.act_blocks) + host.kv_blocks;
  DeviceLimits limits;
  limits.max_rows = prefill + demand.sequences;
  limits.max_mini_batch_rows = rows;
  limits.max_sequences = std::min(demand.sequences, rows);
  limits.act_slots =
      slots_of(host.act_blocks, host.act_blocks / all, slots, demand.largest_request);
  limits.kv_slots = slots_of(host.kv_blocks, host.kv_blocks / all, slots, demand.largest_request);
  limits.logits_rows = smaller(std::min(limits.max_rows, kLogitsRows), halvings, 1);
  limits.max_context = demand.longest_context;
  return limits;
}

}  // namespace

Demand demand_of(std::span<const Request* const> requests, std::int32_t max_num_seqs) {
  std::vector<RequestSize> sizes;
  for (const Request* request : requests) {
    sizes.push_back({request->id, static_cast<std::int32_t>(request->prompt.size()),
                     request->sampling.max_tokens});
  }
  return demand_of(sizes, max_num_seqs);
}

Demand demand_of(std::span<const RequestSize> requests, std::int32_t max_num_seqs) {
  Demand demand;
  demand.sequences = static_cast<std::int32_t>(
      std::min<std::int64_t>(max_num_seqs, static_cast<std::int64_t>(requests.size())));
  std::vector<std::int32_t> blocks, prompts;
  for (const RequestSize& request : requests) {
    blocks.push_back(blocks_for(request.most_context()));
    prompts.push_back(request.prompt);
    demand.longest_context = std::max(demand.longest_context, request.most_context());
    if (blocks.back() > demand.largest_request) {
      demand.largest_request = blocks.back();
      demand.largest = request.id;
    }
  }
  demand.most_blocks = sum_of_largest(std::move(blocks), demand.sequences);
  demand.most_prompt_rows = sum_of_largest(std::move(prompts), demand.sequences);
  return demand;
}

Bytes bytes_for_blocks(const BlockBudget& budget) {
  Bytes bytes = budget.available - budget.device_in_host - kHostReserve;
  if (budget.host_memory) {
    bytes = std::min(bytes, *budget.host_memory - budget.weights);
  }
  return std::max(bytes, Bytes{0});
}

Allocation allocate_host(const Policy& policy, const ModelShape& shape, DType dtype,
                         const Demand& demand, const BatchOptions& options,
                         const BlockBudget& budget) {
  const AllocationInputs inputs{.sizes = block_sizes(shape, dtype),
                                .layers = shape.num_hidden_layers,
                                .host = bytes_for_blocks(budget),
                                .most_blocks = demand.most_blocks,
                                .largest_request = demand.largest_request,
                                .mini_batch = options.mini_batch_tokens / kBlockTokens};
  const Allocation host = policy.allocate(inputs);
  const std::int64_t blocks = std::int64_t{host.act_blocks} + host.kv_blocks;
  if (blocks >= demand.largest_request) {
    return host;
  }
  fail(
      "host memory: the context of the largest request (line {}, {} tokens) takes {} blocks, and "
      "the {:.1f} MiB left for blocks hold {} ({}, {:.1f} MiB available, {:.1f} MiB of weights): "
      "raise --host-memory or leave that line out",
      demand.largest.n, demand.longest_context, demand.largest_request, mib(inputs.host), blocks,
      budget.host_memory ? fmt::format("--host-memory {:.1f} MiB", mib(*budget.host_memory))
                         : std::string("no --host-memory given"),
      mib(budget.available), mib(budget.weights));
}

std::uint64_t region_bytes(const BlockSizes& sizes, const Allocation& host) {
  const Bytes blocks =
      sizes.block(BlockKind::act) * host.act_blocks + sizes.block(BlockKind::kv) * host.kv_blocks;
  return static_cast<std::uint64_t>(round_up(blocks.n, kRegionAlignment));
}

DeviceLimits choose_device_limits(const ModelShape& shape, DType dtype, const Demand& demand,
                                  const Allocation& host, const BatchOptions& options,
                                  Bytes overhead, Bytes cap) {
  DeviceLimits limits = limits_after(0, demand, host, options);
  for (int halvings = 1;
       halvings < 31 && plan_device_memory(shape, dtype, limits, overhead).total > cap;
       ++halvings) {
    limits = limits_after(halvings, demand, host, options);
  }
  if (!host.resident_layers) {
    return with_resident_layers(shape, dtype, limits, overhead, cap);
  }
  limits.resident_layers = *host.resident_layers;
  check_fits(plan_device_memory(shape, dtype, limits, overhead), cap);
  return limits;
}

Placement place_act_blocks(const ModelShape& shape, DType dtype, const Demand& demand,
                           const Allocation& host, const BatchOptions& options, Bytes overhead,
                           Bytes cap) {
  const double all = static_cast<double>(host.act_blocks) + host.kv_blocks;
  const std::int64_t wanted = static_cast<std::int64_t>(
      std::ceil(host.act_blocks / all * static_cast<double>(demand.most_blocks)));
  // The buffers must hold what a request may have of them, wherever it lies.
  Allocation everywhere = host;
  everywhere.act_blocks =
      static_cast<std::uint32_t>(std::max<std::int64_t>(host.act_blocks, wanted));
  Placement placement{
      .host = host,
      .device = choose_device_limits(shape, dtype, demand, everywhere, options, overhead, cap)};
  placement.device = with_gpu_act_blocks(shape, dtype, placement.device, overhead, cap, wanted);
  const std::int64_t here = placement.device.gpu_act_blocks;
  // A pool without any block is none.
  const std::int64_t left = std::max<std::int64_t>(wanted - here, host.kv_blocks > 0 ? 0 : 1);
  placement.host.gpu_act_blocks = static_cast<std::uint32_t>(here);
  placement.host.act_blocks =
      static_cast<std::uint32_t>(std::min<std::int64_t>(host.act_blocks, left));
  return placement;
}

ScheduleLimits schedule_limits(const Demand& demand, const DeviceLimits& device) {
  return {.max_num_seqs = demand.sequences,
          .prefill_rows = device.max_rows - demand.sequences,
          .sequence_rows = device.max_mini_batch_rows};
}

PackLimits pack_limits(const BatchOptions& options, const DeviceLimits& device) {
  const auto slots = static_cast<std::int64_t>(device.act_slots) + device.kv_slots;
  return {.act_slots = device.act_slots,
          .kv_slots = device.kv_slots,
          .tokens = static_cast<std::int32_t>(
              std::min<std::int64_t>(options.mini_batch_tokens, slots * kBlockTokens)),
          .rows = device.max_mini_batch_rows,
          .sequences = device.max_sequences};
}

}  // namespace poise
