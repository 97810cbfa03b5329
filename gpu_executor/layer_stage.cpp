#include "gpu_executor/layer_stage.h"

#include "common/testing/failpoint.h"
#include "common/weight_fetch.h"

namespace poise {

LayerStage::LayerStage(const StageParts& parts, BlockCopies& copies, DType dtype,
                       const DeviceLimits& limits, const WeightLayout& layout,
                       const DeviceSizes& sizes)
    : parts_(parts),
      copies_(copies),
      limits_(limits),
      layout_(layout),
      host_(parts, dtype, limits),
      regenerated_(parts.device.allocate(sizes.regenerated, "regenerated KV")) {}

void LayerStage::run(RunningOrder& order, const LayerOrderWork& work, LayerId layer,
                     const RotaryPlace* places) {
  const LayerWeights& weights = parts_.weights.begin(layer);
  const bool streamed = !is_resident(limits_, layer, layout_.layers);
  const bool queries_wait = streamed && fetches(work.fetch, layout_, layer, Weight::w_q);
  std::vector<Visit> visits;
  for (const std::uint32_t id : work.mini_batches) {
    MiniBatchWork& batch = order.work->mini_batches[id];
    visits.push_back({id, batch, batch.on_host ? nullptr : &copies_.next_side()});
  }
  host_.wait_for_writes(layer);
  const auto load_next = [&](std::size_t i) {
    if (!visits[i].batch.on_host) {
      copies_.load(*order.work, visits[i], layer, i == 0, order.link);
    }
    order.link.weights += parts_.weights.fetch_behind(visits[i].id, work.fetch);
  };
  // Makes a group's keys, values and queries, and sends what host cores attend.
  const auto project = [&](const RowGroup& group, const RowsSide& side, bool regenerate_first) {
    const std::span<const Visit> members(&visits[group.begin], group.end - group.begin);
    const LayerRows rows = rows_of(members.front(), group, side, places);
    const LayerHooks of_rows = hooks(members.front().id, side);
    parts_.device.wait(Stream::compute, *side.stored);
    parts_.decoder.project_kv(weights, rows, of_rows);
    copies_.store(*order.work, members, side, layer, order.link);
    if (regenerate_first) {
      parts_.orders.mark(order, WaitsFor::weights, false);
      regenerate(members.front(), weights, context_of(members.front(), layer), side);
      parts_.orders.mark(order, WaitsFor::blocks, false);
    }
    parts_.decoder.project_queries(weights, rows, of_rows);
    parts_.tracer.end();
    parts_.orders.mark(order, group.begin == 0 ? WaitsFor::weights : WaitsFor::rows, false);
    host_.send(order, members, side, layer);
  };
  load_next(0);
  const std::vector<RowGroup> groups = group(visits);
  const RowGroup* const ahead = queries_wait ? nullptr : sent_ahead(groups);
  const RowsSide* ahead_side = nullptr;
  if (ahead != nullptr) {
    ahead_side = &copies_.next_rows_side();
    project(*ahead, *ahead_side, false);
    host_.wait_until_down();
  }
  for (const RowGroup& group : groups) {
    const bool sent = &group == ahead;
    const RowsSide& side = sent ? *ahead_side : copies_.next_rows_side();
    const LayerRows rows = rows_of(visits[group.begin], group, side, places);
    const bool regenerate_first =
        queries_wait && group.begin == 0 && !visits[group.begin].batch.on_host;
    if (!sent) {
      project(group, side, regenerate_first);
    }
    for (std::size_t i = group.begin; i < group.end; ++i) {
      if (i + 1 < visits.size()) {  // before this one computes, and behind the stores it may read
        load_next(i + 1);
      }
      const bool last = i + 1 == group.end;
      if (visits[i].batch.on_host) {
        host_.receive(order, visits[i]);
        parts_.orders.mark(order, WaitsFor::host, !last);
      } else {
        const LayerContext context = context_of(visits[i], layer);
        if (!regenerate_first || i > group.begin) {
          regenerate(visits[i], weights, context, side);
        }
        attend(visits[i], weights, rows, context, side);
        if (!last || streamed) {
          parts_.orders.mark(order, WaitsFor::blocks, !last);
        }
      }
      failpoint("executor.computing");
      if (last) {
        parts_.decoder.finish(weights, rows, hooks(visits[i].id, side));
        parts_.tracer.end();
        parts_.orders.mark(order, streamed ? WaitsFor::weights : WaitsFor::blocks, true);
      }
    }
  }
  parts_.weights.end();
}

// Says to each mini-batch where its rows begin in its group.
std::vector<RowGroup> LayerStage::group(std::span<Visit> visits) const {
  std::vector<BatchRows> rows;
  for (const Visit& visit : visits) {
    rows.push_back({.first = visit.batch.first_row,
                    .count = visit.batch.rows,
                    .on_host = visit.batch.on_host});
  }
  std::vector<RowGroup> groups = row_groups(rows, limits_.max_mini_batch_rows);
  for (const RowGroup& group : groups) {
    for (std::size_t i = group.begin; i < group.end; ++i) {
      visits[i].first_row = rows[i].first - rows[group.begin].first;
    }
  }
  return groups;
}

LayerRows LayerStage::rows_of(const Visit& first, const RowGroup& group, const RowsSide& side,
                              const RotaryPlace* places) const {
  return {.hidden = parts_.hidden_of(first.batch),
          .rows = group.rows,
          .new_act = side.act.data(),
          .new_kv = side.kv.data(),
          .places = places == nullptr ? nullptr : places + first.batch.first_row};
}

LayerHooks LayerStage::hooks(std::uint32_t mini_batch, const RowsSide& side) {
  return {.need =
              [this](Weight weight) {
                parts_.tracer.end();
                parts_.weights.need(weight);
              },
          .begins =
              [this, mini_batch](messages::SpanKind kind) {
                parts_.tracer.begin(
                    {.kind = kind, .stream = Stream::compute, .mini_batch = mini_batch});
              },
          .unpack = [this](Weight matrix) { parts_.weights.unpack(matrix); },
          .rows_made = [this, &side] { parts_.device.record(*side.made, Stream::compute); }};
}

LayerContext LayerStage::context_of(const Visit& visit, LayerId layer) const {
  const std::byte* tables = visit.side->tables.data();
  const LayerTable& table = visit.batch.layer;
  const RowMove* moves = at<RowMove>(tables, table.moves);
  return {.first_row = visit.first_row,
          .act = visit.side->act.data(),
          .kv = visit.side->kv.data(),
          .regenerated = regenerated_.data(),
          .here = copies_.kv_here(layer),
          .regenerate = visit.batch.brought_into(parts_.shape.window(layer) > 0).regenerate,
          .act_places = at<RotaryPlace>(tables, table.act_places),
          .window = parts_.shape.window(layer),
          .kv_moves = moves,
          .regenerated_moves = moves + table.kv_moves,
          .here_moves = moves + table.kv_moves + table.regenerated_moves,
          .act_moves = moves + table.kv_moves + table.regenerated_moves + table.here_moves,
          .blocks = at<ContextBlock>(tables, table.blocks),
          .sequences = at<AttentionSequence>(tables, table.sequences),
          .kv_move_count = table.kv_moves,
          .regenerated_move_count = table.regenerated_moves,
          .here_move_count = table.here_moves,
          .act_move_count = table.act_moves,
          .one_row = table.one_row,
          .more_rows = table.more_rows,
          .absorbed = table.absorbed,
          .absorbed_positions = table.absorbed_positions};
}

void LayerStage::regenerate(const Visit& visit, const LayerWeights& weights,
                            const LayerContext& context, const RowsSide& side) {
  parts_.device.wait(Stream::compute, *visit.act_there);
  parts_.device.wait(Stream::compute, *visit.side->loaded_here);
  parts_.decoder.regenerate(weights, context, hooks(visit.id, side));
  parts_.tracer.end();
}

void LayerStage::attend(const Visit& visit, const LayerWeights& weights, const LayerRows& rows,
                        const LayerContext& context, const RowsSide& side) {
  parts_.device.wait(Stream::compute, *visit.side->loaded);
  parts_.decoder.attend(weights, rows, context, hooks(visit.id, side));
  parts_.tracer.end();
  parts_.device.record(*visit.side->computed, Stream::compute);
}

}  // namespace poise
