#pragma once
// CAPTURE's Algorithm 1 (HybridServe's is the same): how many ACT and KV blocks the host holds, so
// that T_PCIe = T_load_w + T_load_kv(#KV_Host) and T_Computation = T_kv_gen(#ACT_Host + #ACT_GPU)
// (Eq. 2, 3) are equal. As in the paper, the link's time for host ACT blocks is not counted. Measured
// points of the lines are not used. A pure function; the caller rounds to whole blocks.

#include "common/units.h"
#include "planner/costs/cost_model.h"

namespace poise {

// The algorithm's parameters; times are a decoder layer's, sizes those of all layers together.
struct Algorithm1 {
  Seconds load_w;      // T_load,w: of what crosses the link for a layer, on the average
  Line kv_gen;         // T_kv_gen: of all mini-batches together
  Line load_kv;        // T_load,kv: likewise
  double act_gpu = 0;  // #ACT_GPU
  Bytes host;          // M_Host
  Bytes weights;       // S_weight
  Bytes kv_block;      // S_KV
  Bytes act_block;     // S_ACT; S_KV / 2 only where every query has its own key
};

struct HostBlocksSplit {
  double act = 0;  // #ACT_Host
  double kv = 0;   // #KV_Host

  double act_share() const { return act + kv > 0 ? act / (act + kv) : 0; }
};

// If the host cannot hold all blocks of step 1, it holds as many of them as it can.
HostBlocksSplit algorithm1(const Algorithm1& given);
// The same if requests fill only `blocks` blocks: M_Host is then the memory that holds those, since
// empty blocks take no time on either side.
HostBlocksSplit algorithm1_filled(Algorithm1 given, double blocks);

}  // namespace poise
