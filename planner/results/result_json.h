#pragma once
// The few JSON values that result lines are made of, appended to a string: always valid UTF-8,
// always on one line (also for readers that break lines at U+0085, U+2028 and U+2029), numbers such
// that they read back to the very same float. Pure functions; any thread may call them.

#include <cstdint>
#include <string>
#include <string_view>

namespace poise {

// Quoted and escaped; what is not UTF-8 becomes U+FFFD, as it does in HuggingFace's `tokenizers`.
void append_json_text(std::string& out, std::string_view text);
// The shortest decimal that is this float again; always with a point or an exponent. Below -9999,
// and so for minus infinity, -9999.0, as vLLM writes it. REQUIRES: not NaN, not plus infinity.
void append_json_logprob(std::string& out, float value);
void append_json_integer(std::string& out, std::int64_t value);

}  // namespace poise
