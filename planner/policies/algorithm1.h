#pragma once
// CAPTURE's Algorithm 1 (HybridServe's is the same): how many ACT and KV blocks the host holds, so
// that T_PCIe = T_load_w + T_load_kv(#KV_Host) and T_Computation = T_kv_gen(#ACT_Host + #ACT_GPU)
// (Eq. 2, 3) are equal. To the letter: the link's time for host ACT blocks is not in it. A pure
// function; the caller rounds to whole blocks.

#include "common/units.h"
#include "planner/costs/cost_model.h"

namespace poise {

// The algorithm's parameters; times are a decoder layer's, sizes those of all layers together.
struct Algorithm1 {
  Seconds load_w;      // T_load,w
  Line kv_gen;         // T_kv_gen
  Line load_kv;        // T_load,kv
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

// Where the host cannot even hold what step 1 wants, it holds as much of that as it can.
HostBlocksSplit algorithm1(const Algorithm1& given);
// The same where requests fill only `blocks` of them: M_Host is taken to be as small as holds
// those, since memory that nobody fills balances nothing.
HostBlocksSplit algorithm1_filled(Algorithm1 given, double blocks);

}  // namespace poise
