#include "planner/record/balance.h"

#include <algorithm>

namespace poise {
namespace {

Seconds seconds_of(std::uint64_t ns) { return {static_cast<double>(ns) * 1e-9}; }

Seconds busy(const messages::StreamReport* stream) {
  return stream != nullptr ? seconds_of(stream->busy_ns()) : Seconds{};
}

BalanceSums sums_of(const messages::StreamReport* in, const messages::StreamReport* compute,
                    const messages::StreamReport* out, const messages::LinkBytes* link,
                    const messages::ComputeWaits* waits) {
  BalanceSums sums{.orders = 1, .pcie = busy(in), .compute = busy(compute), .back = busy(out)};
  sums.for_buffers = in != nullptr ? seconds_of(in->wait_ns()) : Seconds{};
  if (waits != nullptr) {
    sums.for_weights = seconds_of(waits->weights_ns());
    sums.for_blocks = seconds_of(waits->blocks_ns());
    sums.for_rows = seconds_of(waits->rows_ns());
  }
  if (link != nullptr) {
    sums.weights = link->weights();
    sums.kv = link->kv();
    sums.act = link->act();
    sums.stores = link->stores();
  }
  return sums;
}

void add_host(BalanceSums& sums, const messages::StreamReport* host, std::uint64_t wait_ns,
              std::uint64_t rows_bytes) {
  sums.host = busy(host);
  sums.host_read = host != nullptr ? host->bytes() : 0;
  sums.for_host = seconds_of(wait_ns);
  sums.host_rows = rows_bytes;
}

void add_mini_batch(BalanceSums& sums, const messages::MiniBatchReport& batch,
                    std::uint64_t order_bytes, const BlockSizes& sizes) {
  sums.act_blocks += batch.act_blocks();
  const double bytes =
      static_cast<double>(batch.kv_blocks()) * static_cast<double>(sizes.block(BlockKind::kv).n) +
      static_cast<double>(batch.act_blocks()) * static_cast<double>(sizes.block(BlockKind::act).n);
  const double per_byte = order_bytes > 0 ? sums.pcie.n / static_cast<double>(order_bytes) : 0;
  if (const double f = f_b(seconds_of(batch.compute_ns()), {bytes * per_byte}); f > 0) {
    sums.f_b += f;
    ++sums.f_b_mini_batches;
  }
}

// Whether the sequence makes rows again for the one behind it, which goes on with their request.
bool makes_again(const messages::MiniBatchT& batch, std::size_t index) {
  const messages::Sequence& sequence = batch.sequences[index];
  const bool goes_on = index + 1 < batch.sequences.size() &&
                       batch.sequences[index + 1].request() == sequence.request() &&
                       batch.sequences[index + 1].first_entry() == sequence.first_entry();
  if (!goes_on || sequence.new_tokens() == 0) {
    return false;
  }
  const std::uint64_t end = std::uint64_t{sequence.context()} + sequence.new_tokens();
  const auto block_of = [&](std::uint64_t token) {
    return sequence.first_entry() + token / kBlockTokens;
  };
  const std::size_t first = block_of(sequence.context()), last = block_of(end - 1);
  return last < batch.entries.size() &&
         std::all_of(batch.entries.begin() + static_cast<std::ptrdiff_t>(first),
                     batch.entries.begin() + static_cast<std::ptrdiff_t>(last) + 1,
                     [](const auto& one) { return one.place() == messages::Place::Nowhere; });
}

}  // namespace

double f_b(Seconds compute, Seconds load) {
  if (!(compute.n > 0) || !(load.n > 0)) {
    return 0;
  }
  const double balance = compute.n / load.n;
  return std::max(balance, 1 / balance);
}

void BalanceSums::add(const BalanceSums& other) {
  iterations += other.iterations;
  orders += other.orders;
  mini_batches += other.mini_batches;
  wall += other.wall;
  pcie += other.pcie;
  compute += other.compute;
  back += other.back;
  host += other.host;
  for_host += other.for_host;
  host_read += other.host_read;
  host_rows += other.host_rows;
  for_weights += other.for_weights;
  for_blocks += other.for_blocks;
  for_rows += other.for_rows;
  for_buffers += other.for_buffers;
  weights += other.weights;
  kv += other.kv;
  act += other.act;
  stores += other.stores;
  act_blocks += other.act_blocks;
  f_b += other.f_b;
  f_b_mini_batches += other.f_b_mini_batches;
}

double BalanceSums::mean_f_b() const {
  return f_b_mini_batches > 0 ? f_b / static_cast<double>(f_b_mini_batches) : 0;
}

BalanceSums balance_of(const messages::LayerDone& done, const BlockSizes& sizes) {
  BalanceSums sums =
      sums_of(done.copy_in(), done.compute(), done.copy_out(), done.link(), done.waits());
  add_host(sums, done.host(), done.host_wait_ns(), done.host_rows_bytes());
  if (done.mini_batches() != nullptr) {
    for (const messages::MiniBatchReport* batch : *done.mini_batches()) {
      add_mini_batch(sums, *batch, sums.weights + sums.kv + sums.act, sizes);
    }
  }
  return sums;
}

BalanceSums balance_of(const messages::LayerDoneT& done, const BlockSizes& sizes) {
  BalanceSums sums = sums_of(done.copy_in.get(), done.compute.get(), done.copy_out.get(),
                             done.link.get(), done.waits.get());
  add_host(sums, done.host.get(), done.host_wait_ns, done.host_rows_bytes);
  for (const messages::MiniBatchReport& batch : done.mini_batches) {
    add_mini_batch(sums, batch, sums.weights + sums.kv + sums.act, sizes);
  }
  return sums;
}

IterationKind kind_of(const messages::IterationT& tables) {
  const auto decodes = [](const messages::MiniBatchT& batch) {
    for (std::size_t i = 0; i < batch.sequences.size(); ++i) {
      const messages::Sequence& one = batch.sequences[i];
      if ((one.new_tokens() != 1 || one.context() == 0) && !makes_again(batch, i)) {
        return false;
      }
    }
    return std::ranges::all_of(batch.samples, [](const auto& one) { return one->step > 0; });
  };
  return {.number = tables.iteration,
          .decodes = std::ranges::all_of(tables.mini_batches,
                                         [&](const auto& batch) { return decodes(*batch); }),
          .mini_batches = tables.mini_batches.size()};
}

void Balance::begin(const IterationKind& kind, Seconds now) {
  open_ = {.kind = kind, .sums = {.iterations = 1}};
  open_.sums.mini_batches = static_cast<std::int64_t>(kind.mini_batches);
  starting_ = since_.n < 0;
  since_ = starting_ ? now : since_;
}

void Balance::end(Seconds now) {
  open_.sums.wall = now - since_;
  since_ = now;
  all_.add(open_.sums);
  if (!starting_) {
    settled_.add(open_.sums);
  }
  if (open_.kind.decodes) {
    decode_.add(open_.sums);
  }
  last_.push_back(open_);
  if (last_.size() > kLast) {
    last_.pop_front();
  }
}

}  // namespace poise
