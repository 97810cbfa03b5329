#include "gpu_executor/pipeline.h"

#include <algorithm>
#include <utility>

#include "common/trouble.h"

namespace poise {
namespace {

template <typename Record>
const Record* at(const std::byte* table, std::int64_t offset) {
  return reinterpret_cast<const Record*>(table + offset);
}

Device& with_cap(Device& device, const Model& model, const DeviceLimits& limits, Bytes cap) {
  check_fits(plan_device_memory(model.shape, model.dtype, limits, device.overhead()), cap);
  device.set_cap(cap);
  return device;
}

}  // namespace

Pipeline::Pipeline(Device& device, const Model& model, const DeviceLimits& limits, Bytes cap,
                   bool trace, std::shared_ptr<const ResidentWeights> resident, Buffer kept)
    : device_(with_cap(device, model, limits, cap)),
      model_(model),
      limits_(limits),
      sizes_(block_sizes(model.shape, model.dtype)),
      weights_(device, model.shape, model.dtype, model.layout, model.weights, limits,
               resident ? std::move(resident)
                        : std::make_shared<const ResidentWeights>(device, model.shape, model.dtype,
                                                                  model.layout, model.weights,
                                                                  limits.resident_layers)),
      decoder_(device, model.shape, model.dtype, limits),
      tracer_(device, trace),
      pool_here_(device_pool(sizes_, limits)),
      host_buffers_(device) {
  const DeviceSizes sizes = device_sizes(model.shape, model.dtype, limits);
  hidden_ = device.allocate(sizes.hidden, "hidden states");
  regenerated_ = device.allocate(sizes.regenerated, "regenerated KV");
  context_blocks_ =
      kept.size().n > 0 ? std::move(kept) : device.allocate(sizes.context_blocks, "context blocks");
  for (Side& side : sides_) {
    side = {.act = device.allocate(sizes.act_buffer, "ACT buffer"),
            .kv = device.allocate(sizes.kv_buffer, "KV buffer"),
            .tables = device.allocate(sizes.batch_tables, "tables"),
            .sampled = device.allocate(sizes.sampled, "samples"),
            .loaded = device.make_signal(),
            .loaded_here = device.make_signal(),
            .computed = device.make_signal(),
            .sampled_made = device.make_signal(),
            .sampled_taken = device.make_signal()};
  }
  for (RowsSide& side : rows_sides_) {
    side = {.act = device.allocate(sizes.new_act, "new ACT rows"),
            .kv = device.allocate(sizes.new_kv, "new KV rows"),
            .made = device.make_signal(),
            .stored = device.make_signal()};
  }
  for (IterationSide& side : iteration_sides_) {
    side = {.tables = device.allocate(sizes.iteration_tables, "tables"),
            .loaded = device.make_signal(),
            .computed = device.make_signal()};
  }
  for (std::int32_t layer = 0; layer < model.shape.num_hidden_layers; ++layer) {
    stored_.push_back(device.make_signal());
  }
  const Bytes planned =
      plan_device_memory(model.shape, model.dtype, limits, device.overhead()).total;
  check(device.in_use() + device.overhead() == planned, "device memory is what was planned");
  for (const Stream stream : kAllStreams) {
    reported_[static_cast<std::size_t>(stream)] = device.make_event();
    device.record(*reported_[static_cast<std::size_t>(stream)], stream);
  }
}

Pipeline::~Pipeline() { device_.finish(); }

void Pipeline::begin(const messages::Iteration& iteration,
                     std::vector<std::vector<std::uint32_t>> after, const HostBlocks& blocks) {
  auto work = std::make_shared<IterationWork>(
      make_work(iteration, std::move(after), blocks, limits_, host_buffers_));
  begun_.emplace(iteration.iteration(), std::move(work));
}

void Pipeline::submit(const LayerOrderWork& order) {
  const auto begun = begun_.find(order.iteration);
  check(begun != begun_.end(), "an order's iteration was begun");
  device_.resume();
  Running running{.seq = order.seq,
                  .stage = order.stage,
                  .mini_batches = order.mini_batches,
                  .work = begun->second};
  if (const auto layer = layer_of(order.stage)) {
    run_layer(running, order, *layer);
  } else if (order.stage == 0) {
    run_embedding(running, order);
  } else {
    run_head(running, order);
    begun_.erase(begun);
  }
  for (const Stream stream : kAllStreams) {
    auto& end = running.ends[static_cast<std::size_t>(stream)] = take_event();
    device_.record(*end, stream);
  }
  running.trace = tracer_.take();
  running_.push_back(std::move(running));
}

void Pipeline::run_layer(Running& order, const LayerOrderWork& work, LayerId layer) {
  const LayerWeights& weights = weights_.begin(layer);
  const bool streamed = !is_resident(limits_, layer, model_.shape.num_hidden_layers);
  std::vector<Visit> visits;
  for (const std::uint32_t id : work.mini_batches) {
    visits.push_back({id, order.work->mini_batches[id], sides_[visits_++ % sides_.size()]});
  }
  const auto load_next = [&](std::size_t i) {
    load(order, visits[i], layer, i == 0);
    fetch_after(order, work, work.mini_batches[i]);
  };
  load_next(0);
  for (const Group& group : groups_of(visits)) {
    const std::span<const Visit> members(&visits[group.first], group.end - group.first);
    const RowsSide& side = rows_sides_[groups_++ % rows_sides_.size()];
    const LayerRows rows = rows_of(members.front(), group, side);
    device_.wait(Stream::compute, *side.stored);
    decoder_.project(weights, rows, hooks(members.front().id, side));
    tracer_.end();
    mark(order, group.first == 0 ? WaitsFor::weights : WaitsFor::rows, false);
    store(order, members, side, layer);
    for (std::size_t i = group.first; i < group.end; ++i) {
      if (i + 1 < visits.size()) {  // before this one computes, and behind the stores it may read
        load_next(i + 1);
      }
      attend(visits[i], layer, weights, rows, side);
      const bool last = i + 1 == group.end;
      if (!last || streamed) {
        mark(order, WaitsFor::blocks, !last);
      }
      if (last) {
        decoder_.finish(weights, rows, hooks(visits[i].id, side));
        tracer_.end();
        mark(order, streamed ? WaitsFor::weights : WaitsFor::blocks, true);
      }
    }
  }
  weights_.end();
}

std::vector<Pipeline::Group> Pipeline::groups_of(std::span<Visit> visits) const {
  std::vector<Group> groups;
  for (std::size_t i = 0; i < visits.size(); ++i) {
    const MiniBatchWork& batch = visits[i].batch;
    const bool beside =
        i > 0 && batch.first_row == visits[i - 1].batch.first_row + visits[i - 1].batch.rows &&
        groups.back().rows + batch.rows <= limits_.max_mini_batch_rows;
    if (!beside) {
      groups.push_back({.first = i, .end = i, .rows = 0});
    }
    visits[i].first_row = groups.back().rows;
    groups.back().rows += batch.rows;
    groups.back().end = i + 1;
  }
  return groups;
}

LayerRows Pipeline::rows_of(const Visit& first, const Group& group, const RowsSide& side) const {
  return {.hidden = hidden_of(first.batch),
          .rows = group.rows,
          .new_act = side.act.data(),
          .new_kv = side.kv.data()};
}

LayerHooks Pipeline::hooks(std::uint32_t mini_batch, const RowsSide& side) {
  return {.need =
              [this](Weight weight) {
                tracer_.end();
                weights_.need(weight);
              },
          .begins =
              [this, mini_batch](messages::SpanKind kind) {
                tracer_.begin({.kind = kind, .stream = Stream::compute, .mini_batch = mini_batch});
              },
          .rows_made = [this, &side] { device_.record(*side.made, Stream::compute); }};
}

void Pipeline::fetch_after(Running& order, const LayerOrderWork& work, std::uint32_t mini_batch) {
  for (const messages::WeightFetch& fetch : work.fetch) {
    if (fetch.after_mini_batch() == mini_batch) {
      const Bytes bytes = weights_.fetch({fetch.layer()}, fetch.piece(), [&] {
        tracer_.begin({.kind = messages::SpanKind::Weights,
                       .stream = Stream::copy_in,
                       .mini_batch = mini_batch,
                       .layer = fetch.layer(),
                       .weight_piece = static_cast<std::uint16_t>(fetch.piece())});
      });
      tracer_.end(bytes);
      order.weights += bytes;
    }
  }
}

void Pipeline::attend(const Visit& visit, LayerId layer_id, const LayerWeights& weights,
                      const LayerRows& rows, const RowsSide& side) {
  device_.wait(Stream::compute, *visit.side.loaded);
  device_.wait(Stream::compute, *visit.side.loaded_here);
  const std::byte* table = visit.side.tables.data();
  const LayerTable& layer = visit.batch.layer;
  const RowMove* moves = at<RowMove>(table, layer.moves);
  decoder_.attend(weights, rows,
                  {.first_row = visit.first_row,
                   .act = visit.side.act.data(),
                   .kv = visit.side.kv.data(),
                   .regenerated = regenerated_.data(),
                   .here = kv_here(layer_id),
                   .regenerate = visit.batch.regenerate,
                   .kv_moves = moves,
                   .regenerated_moves = moves + layer.kv_moves,
                   .here_moves = moves + layer.kv_moves + layer.regenerated_moves,
                   .blocks = at<ContextBlock>(table, layer.blocks),
                   .sequences = at<AttentionSequence>(table, layer.sequences),
                   .kv_move_count = layer.kv_moves,
                   .regenerated_move_count = layer.regenerated_moves,
                   .here_move_count = layer.here_moves,
                   .sequence_count = layer.sequence_count,
                   .max_new_tokens = layer.max_new_tokens,
                   .max_context = layer.max_context},
                  hooks(visit.id, side));
  tracer_.end();
  device_.record(*visit.side.computed, Stream::compute);
}

void Pipeline::mark(Running& order, WaitsFor waits, bool ends_mini_batch) {
  order.points.push_back({take_event(), waits, ends_mini_batch});
  device_.record(*order.points.back().event, Stream::compute);
}

void Pipeline::run_embedding(Running& order, const LayerOrderWork& work) {
  order.work->side = iterations_++ % iteration_sides_.size();
  IterationSide& side = iteration_sides_[order.work->side];
  const IterationTable& table = order.work->table;
  order.begin = take_event();
  device_.record(*order.begin, Stream::copy_in);
  device_.wait(Stream::copy_in, *side.computed);
  const Copy copy{.to = side.tables.data(),
                  .from = order.work->tables.data() + table.span.offset,
                  .bytes = table.span.bytes};
  tracer_.begin({.kind = messages::SpanKind::Tables, .stream = Stream::copy_in});
  device_.copy(Stream::copy_in, {&copy, 1});
  tracer_.end(copy.bytes);
  device_.record(*side.loaded, Stream::copy_in);
  device_.wait(Stream::compute, *side.loaded);
  for (const std::uint32_t id : work.mini_batches) {
    const MiniBatchWork& batch = order.work->mini_batches[id];
    fetch_after(order, work, id);
    tracer_.begin({.kind = messages::SpanKind::Embed, .stream = Stream::compute, .mini_batch = id});
    decoder_.embed(
        weights_.outer(),
        {.tokens = at<std::int32_t>(side.tables.data(), table.tokens) + batch.first_row,
         .positions = at<std::int32_t>(side.tables.data(), table.positions) + batch.first_row,
         .hidden = hidden_of(batch),
         .rows = batch.rows});
    tracer_.end();
    mark(order, WaitsFor::blocks, true);  // what the embedding waits for is the iteration's tables
  }
  device_.record(*side.computed, Stream::compute);
}

// All mini-batches at once, chunk by chunk; results leave while the next chunk is computed. The two
// sides' buffers for samples serve in turn.
void Pipeline::run_head(Running& order, const LayerOrderWork& work) {
  IterationSide& side = iteration_sides_[order.work->side];
  for (const std::uint32_t id : work.mini_batches) {
    fetch_after(order, work, id);
  }
  std::int64_t result = 0;
  for (std::size_t i = 0; i < order.work->head.size(); ++i) {
    const HeadChunk& chunk = order.work->head[i];
    compute_head(*order.work, chunk, sides_[i % sides_.size()], side.tables.data(), result);
    result += chunk.samples;
  }
  for (std::size_t i = 0; i < work.mini_batches.size(); ++i) {
    mark(order, WaitsFor::rows, true);
  }
  device_.record(*side.computed, Stream::compute);
}

void Pipeline::compute_head(const IterationWork& work, const HeadChunk& chunk, Side& side,
                            const std::byte* table, std::int64_t first_result) {
  auto* sampled = reinterpret_cast<SampledRow*>(side.sampled.data());
  device_.wait(Stream::compute, *side.sampled_taken);
  tracer_.begin({.kind = messages::SpanKind::Head, .stream = Stream::compute});
  decoder_.head(weights_.outer(), {.hidden = reinterpret_cast<const float*>(hidden_.data()),
                                   .moves = at<RowMove>(table, chunk.moves),
                                   .sample_rows = at<SampleRow>(table, chunk.sample_rows),
                                   .sampled = sampled,
                                   .rows = chunk.rows,
                                   .sample_count = chunk.samples});
  tracer_.end();
  device_.record(*side.sampled_made, Stream::compute);
  device_.wait(Stream::copy_out, *side.sampled_made);
  const Copy copy{.to = work.results.data() + first_result * kSampledRowBytes,
                  .from = sampled,
                  .bytes = {chunk.samples * kSampledRowBytes}};
  tracer_.begin({.kind = messages::SpanKind::Results, .stream = Stream::copy_out});
  device_.copy(Stream::copy_out, {&copy, 1});
  tracer_.end(copy.bytes);
  device_.record(*side.sampled_taken, Stream::copy_out);
}

void Pipeline::abandon() {
  begun_.clear();
  weights_.abandon();
}

std::optional<LayerId> Pipeline::layer_of(std::uint32_t stage) const {
  if (stage == 0 || stage > static_cast<std::uint32_t>(model_.shape.num_hidden_layers)) {
    return std::nullopt;
  }
  return LayerId{stage - 1};
}

float* Pipeline::hidden_of(const MiniBatchWork& batch) const {
  return reinterpret_cast<float*>(hidden_.data()) + batch.first_row * model_.shape.hidden_size;
}

std::unique_ptr<Event> Pipeline::take_event() {
  if (spare_events_.empty()) {
    return device_.make_event();
  }
  auto event = std::move(spare_events_.back());
  spare_events_.pop_back();
  return event;
}

}  // namespace poise
