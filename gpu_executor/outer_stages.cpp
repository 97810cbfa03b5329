#include "gpu_executor/outer_stages.h"

#include <algorithm>

namespace poise {

OuterStages::OuterStages(const StageParts& parts, const DeviceSizes& sizes) : parts_(parts) {
  Device& device = parts.device;
  for (IterationSide& side : sides_) {
    side = {.tables = device.allocate(sizes.iteration_tables, "tables"),
            .loaded = device.make_signal(),
            .computed = device.make_signal()};
  }
  for (SampleSide& side : sample_sides_) {
    side = {.sampled = device.allocate(sizes.sampled, "samples"),
            .edits = device.allocate(sizes.logit_edits, "edits of logits"),
            .made = device.make_signal(),
            .taken = device.make_signal(),
            .edits_there = device.make_signal()};
  }
}

void OuterStages::run_embedding(RunningOrder& order, const LayerOrderWork& work) {
  auto& [device, tracer, weights, decoder, orders, hidden, shape] = parts_;
  order.work->side = iterations_++ % sides_.size();
  IterationSide& side = sides_[order.work->side];
  const IterationTable& table = order.work->table;
  orders.begin(order);
  device.wait(Stream::copy_in, *side.computed);
  const Copy copy{.to = side.tables.data(),
                  .from = order.work->tables.data() + table.span.offset,
                  .bytes = table.span.bytes};
  tracer.begin({.kind = messages::SpanKind::Tables, .stream = Stream::copy_in});
  device.copy(Stream::copy_in, {&copy, 1});
  tracer.end(copy.bytes);
  device.record(*side.loaded, Stream::copy_in);
  device.wait(Stream::compute, *side.loaded);
  for (const std::uint32_t id : work.mini_batches) {
    const MiniBatchWork& batch = order.work->mini_batches[id];
    order.link.weights += weights.fetch_behind(id, work.fetch);
    tracer.begin({.kind = messages::SpanKind::Embed, .stream = Stream::compute, .mini_batch = id});
    decoder.embed(
        weights.outer(),
        {.tokens = at<std::int32_t>(side.tables.data(), table.tokens) + batch.first_row,
         .positions = at<std::int32_t>(side.tables.data(), table.positions) + batch.first_row,
         .hidden = parts_.hidden_of(batch),
         .rows = batch.rows});
    tracer.end();
    orders.mark(order, WaitsFor::blocks, true);  // the embedding waits for the iteration's tables
  }
  device.record(*side.computed, Stream::compute);
}

const RotaryPlace* OuterStages::places(const IterationWork& work) const {
  if (!parts_.shape.turns_heads()) {
    return nullptr;
  }
  return at<RotaryPlace>(sides_[work.side].tables.data(), work.table.places);
}

void OuterStages::read_by_layer(const IterationWork& work) {
  if (parts_.shape.turns_heads()) {
    parts_.device.record(*sides_[work.side].computed, Stream::compute);
  }
}

void OuterStages::run_head(RunningOrder& order, const LayerOrderWork& work) {
  IterationSide& side = sides_[order.work->side];
  const std::vector<HeadChunk>& chunks = order.work->head;
  const auto side_of = [&](std::size_t i) -> SampleSide& {
    return sample_sides_[i % sample_sides_.size()];
  };
  // Before the weights, which nothing here waits for.
  for (std::size_t i = 0; i < std::min(chunks.size(), sample_sides_.size()); ++i) {
    bring_edits(*order.work, chunks[i], side_of(i));
  }
  for (const std::uint32_t id : work.mini_batches) {
    order.link.weights += parts_.weights.fetch_behind(id, work.fetch);
  }
  std::int64_t result = 0;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    compute_head(*order.work, chunks[i], side_of(i), side.tables.data(), result);
    result += chunks[i].samples;
    if (i + sample_sides_.size() < chunks.size()) {
      bring_edits(*order.work, chunks[i + sample_sides_.size()], side_of(i));
    }
  }
  for (std::size_t i = 0; i < work.mini_batches.size(); ++i) {
    parts_.orders.mark(order, WaitsFor::rows, true);
  }
  parts_.device.record(*side.computed, Stream::compute);
}

void OuterStages::bring_edits(const IterationWork& work, const HeadChunk& chunk, SampleSide& side) {
  if (chunk.edits.bytes.n == 0) {
    return;
  }
  Device& device = parts_.device;
  device.wait(Stream::copy_in, *side.made);  // the chunk before read its own there
  const Copy copy{.to = side.edits.data(),
                  .from = work.tables.data() + chunk.edits.offset,
                  .bytes = chunk.edits.bytes};
  parts_.tracer.begin({.kind = messages::SpanKind::Tables, .stream = Stream::copy_in});
  device.copy(Stream::copy_in, {&copy, 1});
  parts_.tracer.end(copy.bytes);
  device.record(*side.edits_there, Stream::copy_in);
  device.wait(Stream::compute, *side.edits_there);
}

void OuterStages::compute_head(const IterationWork& work, const HeadChunk& chunk, SampleSide& side,
                               const std::byte* table, std::int64_t first_result) {
  auto& [device, tracer, weights, decoder, orders, hidden, shape] = parts_;
  auto* sampled = reinterpret_cast<SampledRow*>(side.sampled.data());
  device.wait(Stream::compute, *side.taken);
  tracer.begin({.kind = messages::SpanKind::Head, .stream = Stream::compute});
  decoder.head(weights.outer(), {.hidden = hidden,
                                 .moves = at<RowMove>(table, chunk.moves),
                                 .sample_rows = at<SampleRow>(table, chunk.sample_rows),
                                 .sampled = sampled,
                                 .edits = reinterpret_cast<LogitEdit*>(side.edits.data()),
                                 .rows = chunk.rows,
                                 .sample_count = chunk.samples});
  tracer.end();
  device.record(*side.made, Stream::compute);
  device.wait(Stream::copy_out, *side.made);
  const Copy copy{.to = work.results.data() + first_result * kSampledRowBytes,
                  .from = sampled,
                  .bytes = {chunk.samples * kSampledRowBytes}};
  tracer.begin({.kind = messages::SpanKind::Results, .stream = Stream::copy_out});
  device.copy(Stream::copy_out, {&copy, 1});
  tracer.end(copy.bytes);
  device.record(*side.taken, Stream::copy_out);
}

}  // namespace poise
