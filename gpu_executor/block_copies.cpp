#include "gpu_executor/block_copies.h"

#include "common/testing/failpoint.h"

namespace poise {
namespace {

Bytes bytes_of(const BlockLoad& run, const BlockSizes& sizes) {
  return sizes.block(run.kind) * (run.count - 1) + sizes.row(run.kind) * run.tail_tokens;
}

}  // namespace

BlockCopies::BlockCopies(Device& device, const ModelShape& shape, DType dtype,
                         const DeviceLimits& limits, Tracer& tracer, std::shared_ptr<Buffer> kept)
    : device_(device),
      tracer_(tracer),
      limits_(limits),
      sizes_(block_sizes(shape, dtype, limits.kv_format)),
      windows_(windows_of(shape)),
      pool_here_(device_pool(sizes_, limits)),
      sides_(static_cast<std::size_t>(limits.sides)) {
  const DeviceSizes sizes = device_sizes(shape, dtype, limits);
  context_blocks_ =
      kept ? std::move(kept)
           : std::make_shared<Buffer>(device.allocate(sizes.context_blocks, "context blocks"));
  for (BatchSide& side : sides_) {
    side = {.act = device.allocate(sizes.act_buffer, "ACT buffer"),
            .kv = device.allocate(sizes.kv_buffer, "KV buffer"),
            .tables = device.allocate(sizes.batch_tables, "tables"),
            .act_loaded = device.make_signal(),
            .loaded = device.make_signal(),
            .loaded_here = device.make_signal(),
            .computed = device.make_signal()};
  }
  for (RowsSide& side : rows_sides_) {
    side = {.act = device.allocate(sizes.new_act, "new ACT rows"),
            .kv = device.allocate(sizes.new_kv, "new KV rows"),
            .made = device.make_signal(),
            .stored = device.make_signal()};
  }
  for (std::int32_t layer = 0; layer < shape.num_hidden_layers; ++layer) {
    stored_.push_back(device.make_signal());
  }
}

void BlockCopies::load(const IterationWork& work, Visit& visit, LayerId layer, bool first,
                       LinkTraffic& link) {
  device_.wait(Stream::copy_in, *visit.side->computed);
  if (first || !visit.batch.after.empty()) {
    device_.wait(Stream::copy_in, *stored_[layer.n]);
  }
  std::vector<Copy> act, kv;
  for (const BlockLoad& run : visit.batch.loads) {
    if (run.place == messages::Place::Host && loads(run, layer)) {
      const bool is_kv = run.kind == BlockKind::kv;
      add_run(work.blocks, run, *visit.side, layer, is_kv ? kv : act);
      (is_kv ? link.kv : link.act) += bytes_of(run, sizes_);
    }
  }
  const TableSpan& table = visit.batch.layer.span;
  std::vector<Copy>& first_copies = act.empty() ? kv : act;
  first_copies.insert(first_copies.begin(), {.to = visit.side->tables.data(),
                                             .from = work.tables.data() + table.offset,
                                             .bytes = table.bytes});
  visit.act_there = visit.side->loaded.get();
  if (!act.empty()) {
    load_host(visit, act);
    if (!kv.empty()) {
      device_.record(*visit.side->act_loaded, Stream::copy_in);
      visit.act_there = visit.side->act_loaded.get();
    }
  }
  if (!kv.empty()) {
    load_host(visit, kv);
  }
  device_.record(*visit.side->loaded, Stream::copy_in);
  load_here(work, visit, layer);
}

void BlockCopies::load_host(const Visit& visit, std::span<const Copy> copies) {
  tracer_.begin(
      {.kind = messages::SpanKind::Load, .stream = Stream::copy_in, .mini_batch = visit.id});
  device_.copy(Stream::copy_in, copies);
  failpoint("executor.loading");
  tracer_.end(bytes_of(copies));
}

bool BlockCopies::loads(const BlockLoad& run, LayerId layer) const {
  return run.seen || windows_.empty() || windows_[layer.n] == 0;
}

// ACT blocks that stay on the device, into their slots.
void BlockCopies::load_here(const IterationWork& work, const Visit& visit, LayerId layer) {
  std::vector<Copy> copies;
  for (const BlockLoad& run : visit.batch.loads) {
    if (run.place == messages::Place::Gpu && loads(run, layer)) {
      add_run(work.blocks, run, *visit.side, layer, copies);
    }
  }
  if (copies.empty()) {
    return;
  }
  device_.wait(Stream::copy_out, *visit.side->computed);
  tracer_.begin(
      {.kind = messages::SpanKind::Load, .stream = Stream::copy_out, .mini_batch = visit.id});
  device_.copy_here(Stream::copy_out, copies);
  tracer_.end(bytes_of(copies));
  device_.record(*visit.side->loaded_here, Stream::copy_out);
}

// A run of ACT blocks ascends in its pool and in the buffer; a run of KV blocks descends in both.
void BlockCopies::add_run(const HostBlocks& blocks, const BlockLoad& run, const BatchSide& side,
                          LayerId layer, std::vector<Copy>& copies) const {
  const std::int64_t size = sizes_.block(run.kind).n;
  const std::int64_t tail = sizes_.row(run.kind).n * run.tail_tokens;
  const auto from = [&](std::uint32_t i) {
    return block_at(blocks, run.place, run.kind, layer, run.first_block + i);
  };
  if (run.kind == BlockKind::act) {
    copies.push_back({.to = side.act.data() + size * run.first_slot,
                      .from = from(0),
                      .bytes = bytes_of(run, sizes_)});
    return;
  }
  const auto place = [&](std::uint32_t i) {
    return side.kv.data() + size * (std::int64_t{limits_.kv_slots} - 1 - run.first_slot - i);
  };
  const std::uint32_t whole = run.tail_tokens == kBlockTokens ? run.count : run.count - 1;
  if (whole > 0) {
    copies.push_back({.to = place(whole - 1), .from = from(whole - 1), .bytes = {size * whole}});
  }
  if (whole < run.count) {
    copies.push_back({.to = place(whole), .from = from(whole), .bytes = {tail}});
  }
}

std::byte* BlockCopies::block_at(const HostBlocks& blocks, messages::Place place, BlockKind kind,
                                 LayerId layer, std::uint32_t block) const {
  return place == messages::Place::Gpu
             ? context_blocks_->data() + pool_here_.offset(sizes_, layer, kind, {block})
             : blocks.data + blocks.partition.offset(sizes_, layer, kind, {block});
}

std::byte* BlockCopies::kv_here(LayerId layer) const {
  const auto blocks = static_cast<std::uint32_t>(limits_.gpu_kv_blocks);
  return blocks > 0 ? context_blocks_->data() +
                          pool_here_.offset(sizes_, layer, BlockKind::kv, {blocks - 1})
                    : nullptr;
}

void BlockCopies::store(const IterationWork& work, std::span<const Visit> visits,
                        const RowsSide& side, LayerId layer, LinkTraffic& link) {
  const HostBlocks& blocks = work.blocks;
  std::vector<Copy> copies, here;
  for (const Visit& visit : visits) {
    for (const RowStore& store : visit.batch.stores) {
      const std::int64_t row = sizes_.row(store.kind).n;
      const Buffer& from = store.kind == BlockKind::kv ? side.kv : side.act;
      std::byte* block = block_at(blocks, store.place, store.kind, layer, store.block);
      (store.place == messages::Place::Gpu ? here : copies)
          .push_back({.to = block + row * store.token,
                      .from = from.data() + row * (visit.first_row + store.row),
                      .bytes = {row * store.count}});
    }
  }
  if (copies.empty() && here.empty()) {
    return;
  }
  link.stores += bytes_of(copies);
  device_.wait(Stream::copy_out, *side.made);
  tracer_.begin({.kind = messages::SpanKind::Store,
                 .stream = Stream::copy_out,
                 .mini_batch = visits.front().id});
  device_.copy(Stream::copy_out, copies);
  failpoint("executor.storing");
  device_.copy_here(Stream::copy_out, here);
  tracer_.end(bytes_of(copies) + bytes_of(here));
  device_.record(*side.stored, Stream::copy_out);
  device_.record(*stored_[layer.n], Stream::copy_out);
}

}  // namespace poise
