#include "gpu_executor/weights_on_device.h"

#include "common/trouble.h"

namespace poise {

WeightsOnDevice::WeightsOnDevice(Device& device, Tracer& tracer, const ModelShape& shape,
                                 DType dtype, const WeightLayout& layout,
                                 std::span<const std::byte> host, const DeviceLimits& limits,
                                 std::shared_ptr<const ResidentWeights> resident)
    : device_(device),
      tracer_(tracer),
      map_(device, shape, dtype, layout, host),
      ledger_(limits, layout.layers, static_cast<std::int32_t>(layout.layer.pieces.size())),
      resident_(std::move(resident)) {
  check(resident_->layers() == limits.resident_layers, "the layers wanted are resident");
  const DeviceSizes sizes = device_sizes(shape, dtype, limits);
  for (Streamed& one : streamed_) {
    one.memory = device.allocate(sizes.layer_buffer, "streamed weights");
    one.computed = device.make_signal();
    for (std::size_t piece = 0; piece < layout.layer.pieces.size(); ++piece) {
      one.arrived.push_back(device.make_signal());
    }
    if (sizes.layer_buffer.n > 0) {
      one.weights = map_.layer_at(one.memory.data());
    }
  }
  unpacked_ = device.allocate(sizes.unpacked, "unpacked weights");
}

Bytes WeightsOnDevice::fetch_behind(std::uint32_t mini_batch,
                                    std::span<const messages::WeightFetch> fetches) {
  Bytes bytes{};
  for (const messages::WeightFetch& one : fetches) {
    if (one.after_mini_batch() == mini_batch) {
      bytes += fetch({one.layer()}, one.piece(), mini_batch);
    }
  }
  return bytes;
}

Bytes WeightsOnDevice::fetch(LayerId layer, std::uint32_t piece, std::uint32_t mini_batch) {
  Streamed& buffer = streamed_[static_cast<std::size_t>(ledger_.fetch(layer, piece))];
  device_.wait(Stream::copy_in, *buffer.computed);
  tracer_.begin({.kind = messages::SpanKind::Weights,
                 .stream = Stream::copy_in,
                 .mini_batch = mini_batch,
                 .layer = layer.n,
                 .weight_piece = static_cast<std::uint16_t>(piece)});
  const Bytes bytes =
      map_.upload_layer(layer, buffer.memory.data(), static_cast<std::int32_t>(piece));
  tracer_.end(bytes);
  device_.record(*buffer.arrived[piece], Stream::copy_in);
  return bytes;
}

const LayerWeights& WeightsOnDevice::begin(LayerId layer) {
  check(!buffer_in_use_, "one layer is computed at a time");
  needed_ = 0;
  made_ = 0;
  if (ledger_.streamed(layer)) {
    buffer_in_use_ = ledger_.use(layer);
    stored_ = &streamed_[static_cast<std::size_t>(*buffer_in_use_)].weights;
  } else {
    stored_ = &resident_->layer(layer);
  }
  multiplied_ = device_.reads_packed() ? *stored_ : map_.unpacked(*stored_, unpacked_.data());
  return multiplied_;
}

void WeightsOnDevice::need(Weight weight) {
  const WeightEntry* entry = map_.layout().layer.find(weight);
  if (!buffer_in_use_ || entry == nullptr) {
    return;
  }
  if (entry->packed) {
    need(groups_of(weight));
  }
  const Streamed& buffer = streamed_[static_cast<std::size_t>(*buffer_in_use_)];
  for (std::int32_t piece = entry->piece; piece <= entry->last_piece; ++piece) {
    if ((needed_ >> piece & 1) == 0) {
      needed_ |= std::uint64_t{1} << piece;
      device_.wait(Stream::compute, *buffer.arrived[static_cast<std::size_t>(piece)]);
    }
  }
}

void WeightsOnDevice::unpack(Weight matrix) {
  const Matrix& stored = stored_->matrix(matrix);
  const Matrix& multiplied = multiplied_.matrix(matrix);
  if (!stored.packed.is_packed() || multiplied.packed.is_packed() ||
      (made_ & bit_of(matrix)) != 0) {
    return;
  }
  made_ |= bit_of(matrix);
  device_.launch(Unpack{.out = const_cast<void*>(multiplied.data), .weight = stored});
}

void WeightsOnDevice::end() {
  if (buffer_in_use_) {
    device_.record(*streamed_[static_cast<std::size_t>(*buffer_in_use_)].computed, Stream::compute);
    ledger_.used(*buffer_in_use_);
    buffer_in_use_.reset();
  }
}

}  // namespace poise
