#pragma once
// exp, sine and cosine, and the activations, over sixteen lanes: polynomials evaluated in one fixed
// order, so that the bits depend on neither instruction set nor libm. Included after one of
// lanes_*.h.

namespace poise::cpu {
namespace {

// Within 1 ulp for x in [-87.33, 88.37]; 0 below (the result would be subnormal), infinity above;
// not a number stays so. x = n·ln 2 + r, |r| ≤ ln 2 / 2, eˣ = 2ⁿ·eʳ.
inline Lanes exp(Lanes x) {
  const Lanes shift = Lanes::all(12582912.0f);  // 1.5·2²³: adding it rounds to a whole number
  const Lanes n = Lanes::fma(x, Lanes::all(0x1.715476p+0f), shift) - shift;
  // ln 2 in two parts, the first short enough for n · part to be exact.
  Lanes r = Lanes::fma(n, Lanes::all(-0x1.62e4p-1f), x);
  r = Lanes::fma(n, Lanes::all(-0x1.7f7d1cp-20f), r);
  // eʳ = 1 + r + r²·p(r), p minimax to 3e-9 of eʳ.
  Lanes p = Lanes::all(0.00138151561112f);
  p = Lanes::fma(p, r, Lanes::all(0.00836879391674f));
  p = Lanes::fma(p, r, Lanes::all(0.0416683862089f));
  p = Lanes::fma(p, r, Lanes::all(0.166665199968f));
  p = Lanes::fma(p, r, Lanes::all(0.499999934289f));
  p = Lanes::fma(p, r * r, r) + Lanes::all(1.0f);
  Lanes result = p * Lanes::power_of_two(n);
  result = Lanes::where_less(x, Lanes::all(-87.33f), Lanes::zero(), result);
  return Lanes::where_less(Lanes::all(88.37f), x, Lanes::all(__builtin_inff()), result);
}

// x·Φ(x), Φ the normal distribution: torch's GELU(approximate='none'). With z = |x| / √2: below 1
// from erf(z) = z·p(z²); above from erfc(z) = exp(-z²)·t·q(t), t = 1 / (1 + z/2).
inline Lanes gelu(Lanes x) {
  // Beyond 11 the tail is 0 in float32, and z² must stay finite.
  const Lanes far_end = Lanes::all(11.0f);
  const Lanes distance = Lanes::abs(x) * Lanes::all(0.70710678118654752f);
  const Lanes z = Lanes::where_less(far_end, distance, far_end, distance);
  const Lanes one = Lanes::all(1.0f);
  const Lanes half = Lanes::all(0.5f);

  const Lanes u = z * z;
  Lanes p = Lanes::all(7.78769804055e-5f);
  p = Lanes::fma(p, u, Lanes::all(-0.00079916175797f));
  p = Lanes::fma(p, u, Lanes::all(0.0051863836033f));
  p = Lanes::fma(p, u, Lanes::all(-0.0268528806726f));
  p = Lanes::fma(p, u, Lanes::all(0.112835651465f));
  p = Lanes::fma(p, u, Lanes::all(-0.376126242677f));
  p = Lanes::fma(p, u, Lanes::all(1.12837916553f));
  // x/2 · (1 + sign(x)·erf(z)); x·z·p is |x|·erf(z) with x's sign, so halve and add its magnitude.
  const Lanes near = half * Lanes::fma(Lanes::abs(x) * z, p, x);

  const Lanes t = one / Lanes::fma(half, z, one);
  Lanes q = Lanes::all(-0.0646896263669f);
  q = Lanes::fma(q, t, Lanes::all(0.200607613789f));
  q = Lanes::fma(q, t, Lanes::all(-0.16288114242f));
  q = Lanes::fma(q, t, Lanes::all(-0.0553142415269f));
  q = Lanes::fma(q, t, Lanes::all(0.0224998017344f));
  q = Lanes::fma(q, t, Lanes::all(0.0687361478166f));
  q = Lanes::fma(q, t, Lanes::all(0.180477594487f));
  q = Lanes::fma(q, t, Lanes::all(0.246174960046f));
  q = Lanes::fma(q, t, Lanes::all(0.282151079682f));
  q = Lanes::fma(q, t, Lanes::all(0.28209276259f));
  // Adds back what rounding z² lost; it matters in the far tail.
  const Lanes lost = Lanes::fma(z, z, Lanes::zero() - u);
  const Lanes gauss = exp(Lanes::zero() - u) * (one - lost);
  // Φ(-|x|), and with it x·Φ(x) on either side of 0. Where the tail is 0 so is the product, at
  // infinity too.
  const Lanes tail = half * gauss * (t * q);
  const Lanes product = Lanes::where_less(Lanes::zero(), tail, x * tail, tail);
  const Lanes far = Lanes::where_less(x, Lanes::zero(), product, x - product);
  return Lanes::where_less(z, one, near, far);
}

// x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³))) = x / (1 + exp(-2·√(2/π)·(x + 0.044715·x³)))
inline Lanes gelu_tanh(Lanes x) {
  const Lanes cubic = Lanes::fma(Lanes::all(0.044715f) * x * x, x, x);
  const Lanes decay = exp(Lanes::all(-1.5957691216057308f) * cubic);
  return x / (Lanes::all(1.0f) + decay);
}

// x / (1 + exp(-x))
inline Lanes silu(Lanes x) { return x / (Lanes::all(1.0f) + exp(Lanes::zero() - x)); }

inline Lanes relu(Lanes x) { return Lanes::where_less(x, Lanes::zero(), Lanes::zero(), x); }

inline Lanes apply(Epilogue epilogue, Lanes x) {
  switch (epilogue) {
    case Epilogue::none:
      return x;
    case Epilogue::relu:
      return relu(x);
    case Epilogue::gelu:
      return gelu(x);
    case Epilogue::gelu_tanh:
      return gelu_tanh(x);
    case Epilogue::silu:
      return silu(x);
  }
  return x;
}

struct SineCosine {
  Lanes sine, cosine;
};
// Within 2⁻²³ for x in [0, 2¹⁷], within 2⁻²² up to 2²⁰. x = n·π/2 + r, |r| a little over π/4 at most;
// the product with the first of π/2's three parts is exact within its fused operation, so that nothing
// is lost where x and n·π/2 are nearly equal.
inline SineCosine sine_cosine(Lanes x) {
  const Lanes shift = Lanes::all(12582912.0f);  // 1.5·2²³: adding it rounds to a whole number
  const Lanes n = Lanes::fma(x, Lanes::all(0x1.45f306p-1f), shift) - shift;
  Lanes r = Lanes::fma(n, Lanes::all(-0x1.921fb6p+0f), x);
  r = Lanes::fma(n, Lanes::all(0x1.777a5cp-25f), r);
  r = Lanes::fma(n, Lanes::all(0x1.ee59dap-50f), r);
  const Lanes u = r * r;
  Lanes p = Lanes::all(-1.9515295891e-4f);
  p = Lanes::fma(p, u, Lanes::all(8.3321608736e-3f));
  p = Lanes::fma(p, u, Lanes::all(-1.6666654611e-1f));
  const Lanes sine = Lanes::fma(p * u, r, r);
  Lanes q = Lanes::all(2.443315711809948e-5f);
  q = Lanes::fma(q, u, Lanes::all(-1.388731625493765e-3f));
  q = Lanes::fma(q, u, Lanes::all(4.166664568298827e-2f));
  const Lanes cosine = Lanes::fma(q * u, u, Lanes::fma(Lanes::all(-0.5f), u, Lanes::all(1.0f)));
  // The quarter turn n mod 4 as one of -2, -1, 0, 1, 2.
  const Lanes whole = Lanes::fma(n, Lanes::all(0.25f), shift) - shift;
  const Lanes quarter = Lanes::fma(whole, Lanes::all(-4.0f), n);
  const Lanes half = Lanes::all(0.5f), minus_half = Lanes::all(-0.5f);
  const Lanes three_halves = Lanes::all(1.5f), minus_three_halves = Lanes::all(-1.5f);
  const Lanes off = Lanes::abs(Lanes::abs(quarter) - Lanes::all(1.0f));  // 0 where the two change
  Lanes s = Lanes::where_less(off, half, cosine, sine);
  Lanes c = Lanes::where_less(off, half, sine, cosine);
  const Lanes minus_s = Lanes::zero() - s, minus_c = Lanes::zero() - c;
  s = Lanes::where_less(quarter, minus_half, minus_s,
                        Lanes::where_less(three_halves, quarter, minus_s, s));
  c = Lanes::where_less(half, quarter, minus_c,
                        Lanes::where_less(quarter, minus_three_halves, minus_c, c));
  return {.sine = s, .cosine = c};
}

}  // namespace
}  // namespace poise::cpu
