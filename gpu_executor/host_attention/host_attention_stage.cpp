#include "gpu_executor/host_attention/host_attention_stage.h"

#include "common/testing/failpoint.h"

namespace poise {

HostAttentionStage::HostAttentionStage(const StageParts& parts, DType dtype,
                                       const DeviceLimits& limits)
    : parts_(parts),
      sizes_(block_sizes(parts.shape, dtype, limits.kv_format)),
      q_row_(size_of(parts.device.work_type(dtype)) * parts.shape.q_dim()) {
  if (!limits.host_attention) {
    return;
  }
  Device& device = parts_.device;
  const std::int64_t rows = limits.max_mini_batch_rows;
  q_ = device.allocate_host(q_row_ * rows);
  kv_ = device.allocate_host(sizes_.kv_row * rows);
  attended_ = device.allocate_host(q_row_ * rows);
  queries_made_ = device.make_signal();
  down_ = device.make_signal();
  for (std::int32_t layer = 0; layer < parts.shape.num_hidden_layers; ++layer) {
    written_.push_back(device.make_signal());
  }
}

void HostAttentionStage::wait_for_writes(LayerId layer) {
  if (!written_.empty()) {
    parts_.device.wait(Stream::copy_in, *written_[layer.n]);
  }
}

void HostAttentionStage::send(RunningOrder& order, std::span<const Visit> visits,
                              const RowsSide& side, LayerId layer) {
  bool any = false;
  for (const Visit& visit : visits) {
    any = any || visit.batch.on_host;
  }
  if (!any) {
    return;
  }
  Device& device = parts_.device;
  copy_down(order, visits, side);
  device.wait(Stream::host, *down_);
  for (const Visit& visit : visits) {
    if (!visit.batch.on_host) {
      continue;
    }
    const HostAttention work = work_of(*order.work, visit, layer);
    parts_.tracer.begin({.kind = messages::SpanKind::HostAttention,
                         .stream = Stream::host,
                         .mini_batch = visit.id});
    device.launch(work);
    failpoint("executor.attending");
    parts_.tracer.end({work.bytes});
    std::unique_ptr<Event>& attended = attended_of_[visit.id];
    if (!attended) {
      attended = device.make_signal();
    }
    device.record(*attended, Stream::host);
  }
  device.record(*written_[layer.n], Stream::host);
}

void HostAttentionStage::wait_until_down() { parts_.device.wait(Stream::compute, *down_); }

void HostAttentionStage::copy_down(RunningOrder& order, std::span<const Visit> visits,
                                   const RowsSide& side) {
  Device& device = parts_.device;
  std::vector<Copy> copies;
  for (const Visit& visit : visits) {
    if (!visit.batch.on_host) {
      continue;
    }
    const std::int64_t first = visit.first_row, count = visit.batch.rows;
    copies.push_back({.to = rows(q_, q_row_, first),
                      .from = parts_.decoder.queries(first),
                      .bytes = q_row_ * count});
    copies.push_back({.to = rows(kv_, sizes_.kv_row, first),
                      .from = side.kv.data() + sizes_.kv_row.n * first,
                      .bytes = sizes_.kv_row * count});
  }
  const Bytes bytes = bytes_of(copies);
  order.link.stores += bytes;
  device.record(*queries_made_, Stream::compute);
  device.wait(Stream::copy_out, *queries_made_);
  parts_.tracer.begin({.kind = messages::SpanKind::HostRows,
                       .stream = Stream::copy_out,
                       .mini_batch = visits.back().id});
  device.copy(Stream::copy_out, copies);
  parts_.tracer.end(bytes);
  device.record(*down_, Stream::copy_out);
}

HostAttention HostAttentionStage::work_of(const IterationWork& iteration, const Visit& visit,
                                          LayerId layer) const {
  const std::byte* tables = iteration.tables.data() + visit.batch.layer.span.offset;
  const LayerTable& table = visit.batch.layer;
  const PoolPartition& pool = iteration.blocks.partition;
  // Blocks are numbered from the region's end, as in a KV buffer.
  std::byte* blocks =
      iteration.blocks.data + pool.offset(sizes_, layer, BlockKind::kv, {pool.kv_blocks - 1});
  const std::int32_t window = parts_.shape.window(layer);
  Attention attention =
      parts_.decoder.attention_of({.window = window,
                                   .blocks = at<ContextBlock>(tables, table.blocks),
                                   .sequences = at<AttentionSequence>(tables, table.sequences),
                                   .together = both(table.one_row, table.more_rows)});
  attention.out = rows(attended_, q_row_, visit.first_row);
  attention.q = rows(q_, q_row_, visit.first_row);
  attention.slots[0] = blocks;
  return {.rows = {.out = blocks,
                   .in = static_cast<const std::byte*>(rows(kv_, sizes_.kv_row, visit.first_row)),
                   .moves = at<RowMove>(tables, table.moves),
                   .row_bytes = sizes_.kv_row.n,
                   .count = table.kv_moves},
          .attention = attention,
          .bytes = sizes_.kv_row.n *
                   (window > 0 ? visit.batch.host_rows_in_window : visit.batch.host_rows)};
}

void HostAttentionStage::receive(RunningOrder& order, const Visit& visit) {
  const Copy up{.to = parts_.decoder.attended(visit.first_row),
                .from = rows(attended_, q_row_, visit.first_row),
                .bytes = q_row_ * visit.batch.rows};
  parts_.device.wait(Stream::compute, *attended_of_.at(visit.id));
  parts_.tracer.begin(
      {.kind = messages::SpanKind::HostRows, .stream = Stream::compute, .mini_batch = visit.id});
  parts_.device.copy(Stream::compute, {&up, 1});
  parts_.tracer.end(up.bytes);
  order.host_rows += up.bytes;
}

}  // namespace poise
