// What the machine's cores can do.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace poise {

#if defined(__x86_64__)
// F16C: the conversions between float16 and float32. clang's `__builtin_cpu_supports` does not know it. These
// instructions use AVX registers, so the caller also asks for AVX2, which includes the operating system's support.
inline bool cpu_has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & (1u << 29)) != 0;
}
#endif

}  // namespace poise
