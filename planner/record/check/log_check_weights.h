#pragma once
// The check of a log's weights (planner/record/check/log_check.h): each streamed layer is complete when it is
// computed, was fetched once for that, and two buffers hold all layers under way.

#include <array>
#include <cstdint>
#include <set>
#include <string>

#include "common/messages_generated.h"
#include "planner/record/check/log_check.h"

namespace poise {

class CheckedWeights {
 public:
  // `pieces`: of a layer's weights. `report` outlives this.
  CheckedWeights(std::int32_t layers, std::size_t pieces, LogCheckReport& report)
      : layers_(layers), pieces_(pieces), report_(report) {}

  // The device's buffers are empty; `resident_layers` layers stay on it.
  void configure(std::int32_t resident_layers);
  void take(const messages::LayerOrderT& order, const std::string& where);
  // Orders before the next iteration are unknown. From its end on, both buffers are known again.
  void trust_until_known() { trusted_ = 2; }
  void begin_iteration() { trusted_ -= trusted_ > 0 ? 1 : 0; }

 private:
  struct LayerBuffer {  // one of the two that streamed layers pass through
    enum class State { idle, waits, computes } state = State::idle;
    std::uint32_t layer = ~0u;
    std::set<std::uint32_t> pieces;
    std::uint64_t used = 0;  // when it was computed from, in uses
  };

  void fetch(const messages::WeightFetch& fetch, const std::string& where);
  LayerBuffer* find(std::uint32_t layer, LayerBuffer::State state);
  LayerBuffer* take_idle(std::uint32_t layer, LayerBuffer::State state);
  bool streamed(std::uint32_t layer) const;
  void violation(const std::string& where, const std::string& what);

  std::int32_t layers_;
  std::size_t pieces_;
  LogCheckReport& report_;
  std::int32_t resident_layers_ = 0;
  int trusted_ = 0;  // beginnings of iterations until buffers are known
  std::array<LayerBuffer, 2> buffers_;
  std::uint64_t uses_ = 0;
};

}  // namespace poise
