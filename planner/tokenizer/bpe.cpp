#include "planner/tokenizer/bpe.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <iterator>
#include <queue>
#include <utility>

#include "common/trouble.h"
#include "planner/tokenizer/byte_alphabet.h"
#include "planner/tokenizer/unicode.h"

namespace poise {
namespace {

constexpr TokenId kNoToken = -1;
constexpr std::uint32_t kNoMerge = UINT32_MAX;
constexpr std::uint32_t kEmptySlot = UINT32_MAX;
constexpr std::uint64_t kEmptyKey = UINT64_MAX;  // no token is -1

// Up to here looking at every pair again after each merge is the fastest.
constexpr std::size_t kFewSymbols = 32;

std::uint64_t key_of(TokenId left, TokenId right) {
  return static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right);
}

std::uint64_t scramble(std::uint64_t x) {
  x *= 0x9E3779B97F4A7C15u;
  return x ^ x >> 32;
}

std::uint32_t tag_of(std::uint64_t hash) { return static_cast<std::uint32_t>(hash >> 32); }

std::uint64_t hash_of(std::string_view bytes) {
  std::uint64_t hash = bytes.size();
  while (bytes.size() > 8) {
    std::uint64_t eight = 0;
    std::memcpy(&eight, bytes.data(), 8);
    hash = scramble(hash ^ eight);
    bytes.remove_prefix(8);
  }
  std::uint64_t last = 0;
  std::memcpy(&last, bytes.data(), bytes.size());
  return scramble(scramble(hash ^ last));
}

// The byte that a token of byte fallback stands for: "<0x0A>".
std::optional<std::uint8_t> byte_of_fallback(std::string_view token) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') {
    return std::nullopt;
  }
  const std::size_t high = kDigits.find(token[3]), low = kDigits.find(token[4]);
  if (high == std::string_view::npos || low == std::string_view::npos) {
    return std::nullopt;
  }
  return static_cast<std::uint8_t>(high << 4 | low);
}

}  // namespace

Bpe::Bpe(const BpeDescription& description)
    : unknown_(description.unknown),
      byte_level_(description.byte_level),
      byte_fallback_(description.byte_fallback),
      fuse_unknown_(description.fuse_unknown),
      ignore_merges_(description.ignore_merges) {
  add_whole_words(description);
  add_merges(description);
}

void Bpe::add_whole_words(const BpeDescription& description) {
  byte_tokens_.fill(kNoToken);
  whole_words_ = std::make_unique<WholeWord[]>(description.vocabulary.size());
  word_slots_.assign(std::bit_ceil(2 * description.vocabulary.size() + 1), {0, kEmptySlot});
  std::uint32_t count = 0;
  for (const auto& [token, id] : description.vocabulary) {
    const std::optional<std::string> bytes = byte_level_ ? alphabet_to_bytes(token) : token;
    if (!bytes || bytes->empty()) {
      continue;  // with characters beyond the alphabet it can be met in decoding alone
    }
    if (byte_level_ && bytes->size() == 1) {
      byte_tokens_[static_cast<unsigned char>(bytes->front())] = id;
    }
    if (const auto byte = byte_level_ ? std::nullopt : byte_of_fallback(token)) {
      byte_tokens_[*byte] = id;
    }
    WholeWord& word = whole_words_[count];
    word.begin = static_cast<std::uint32_t>(word_bytes_.size());
    word.size = static_cast<std::uint32_t>(bytes->size());
    word.token = id;
    word.reached = ignore_merges_ ? Reached::yes : Reached::unknown;
    word_bytes_ += *bytes;
    longest_word_ = std::max(longest_word_, bytes->size());

    const std::uint64_t hash = hash_of(*bytes);
    std::size_t slot = hash & (word_slots_.size() - 1);
    while (word_slots_[slot].word != kEmptySlot) {
      slot = (slot + 1) & (word_slots_.size() - 1);
    }
    word_slots_[slot] = {tag_of(hash), count++};
  }
  check(word_bytes_.size() < UINT32_MAX, "places in the words' bytes fit");
}

void Bpe::add_merges(const BpeDescription& description) {
  check(description.merges.size() < kNoMerge, "ranks of merges fit");
  const std::size_t slots = std::bit_ceil(2 * description.merges.size() + 1);
  merge_keys_.assign(slots, kEmptyKey);
  merges_.resize(slots);
  for (std::uint32_t rank = 0; rank < description.merges.size(); ++rank) {
    const BpeDescription::Merge& merge = description.merges[rank];
    const std::uint64_t key = key_of(merge.left, merge.right);
    std::size_t slot = scramble(key) & (slots - 1);
    while (merge_keys_[slot] != kEmptyKey && merge_keys_[slot] != key) {
      slot = (slot + 1) & (slots - 1);
    }
    merge_keys_[slot] = key;
    merges_[slot] = {rank, merge.whole};  // listed twice: the later line counts, as in `tokenizers`
  }
}

Bpe::WholeWord* Bpe::find_whole_word(std::string_view word) const {
  if (word.size() > longest_word_) {
    return nullptr;
  }
  const std::uint64_t hash = hash_of(word);
  const std::size_t mask = word_slots_.size() - 1;
  for (std::size_t at = hash & mask;; at = (at + 1) & mask) {
    const Slot slot = word_slots_[at];
    if (slot.word == kEmptySlot) {
      return nullptr;
    }
    if (slot.tag == tag_of(hash)) {
      WholeWord& candidate = whole_words_[slot.word];
      if (std::string_view(word_bytes_).substr(candidate.begin, candidate.size) == word) {
        return &candidate;
      }
    }
  }
}

const Bpe::Merge* Bpe::find_merge(TokenId left, TokenId right) const {
  const std::uint64_t key = key_of(left, right);
  const std::size_t mask = merge_keys_.size() - 1;
  for (std::size_t slot = scramble(key) & mask;; slot = (slot + 1) & mask) {
    if (merge_keys_[slot] == key) {
      return &merges_[slot];
    }
    if (merge_keys_[slot] == kEmptyKey) {
      return nullptr;
    }
  }
}

std::uint32_t Bpe::rank(TokenId left, TokenId right) const {
  const Merge* merge = find_merge(left, right);
  return merge == nullptr ? kNoMerge : merge->rank;
}

void Bpe::encode(std::string_view word, std::vector<TokenId>& tokens) const {
  WholeWord* whole = find_whole_word(word);
  const Reached reached =
      whole == nullptr ? Reached::no : whole->reached.load(std::memory_order_relaxed);
  if (reached == Reached::yes) {
    tokens.push_back(whole->token);
    return;
  }
  const std::size_t before = tokens.size();
  encode_by_merges(word, tokens);
  if (reached == Reached::unknown) {
    const bool alone = tokens.size() == before + 1 && tokens.back() == whole->token;
    whole->reached.store(alone ? Reached::yes : Reached::no, std::memory_order_relaxed);
  }
}

void Bpe::encode_by_merges(std::string_view word, std::vector<TokenId>& tokens) const {
  thread_local std::vector<TokenId> symbols;
  symbols.clear();
  byte_level_ ? begin_with_bytes(word, symbols) : begin_with_characters(word, symbols);
  if (symbols.size() <= kFewSymbols) {
    merge_few(symbols);
  } else {
    merge_many(symbols);
  }
  tokens.insert(tokens.end(), symbols.begin(), symbols.end());
}

void Bpe::begin_with_bytes(std::string_view word, std::vector<TokenId>& symbols) const {
  bool after_unknown = false;
  for (const char c : word) {
    const TokenId token = byte_tokens_[static_cast<unsigned char>(c)];
    if (token != kNoToken) {
      symbols.push_back(token);
      after_unknown = false;
    } else if (unknown_) {
      if (!after_unknown || !fuse_unknown_) {
        symbols.push_back(*unknown_);
      }
      after_unknown = true;
    }
  }
}

void Bpe::begin_with_characters(std::string_view word, std::vector<TokenId>& symbols) const {
  // As in `tokenizers`, an unknown token stands before the next known character, behind bytes between.
  bool unknown_waits = false;
  for (std::size_t at = 0; at < word.size();) {
    const std::string_view character = word.substr(at, code_point_at(word, at).bytes);
    at += character.size();
    if (const WholeWord* known = find_whole_word(character)) {
      if (std::exchange(unknown_waits, false)) {
        symbols.push_back(*unknown_);
      }
      symbols.push_back(known->token);
    } else if (!fall_back_to_bytes(character, symbols) && unknown_) {
      if (std::exchange(unknown_waits, true) && !fuse_unknown_) {
        symbols.push_back(*unknown_);
      }
    }
  }
  if (unknown_waits) {
    symbols.push_back(*unknown_);
  }
}

bool Bpe::fall_back_to_bytes(std::string_view character, std::vector<TokenId>& symbols) const {
  const auto token_of = [&](char byte) { return byte_tokens_[static_cast<unsigned char>(byte)]; };
  if (!byte_fallback_ || std::ranges::find(character, kNoToken, token_of) != character.end()) {
    return false;
  }
  std::ranges::transform(character, std::back_inserter(symbols), token_of);
  return true;
}

void Bpe::merge_few(std::vector<TokenId>& symbols) const {
  std::array<std::uint32_t, kFewSymbols> ranks;  // of each symbol and the next one
  std::size_t count = symbols.size();
  for (std::size_t n = 0; n + 1 < count; ++n) {
    ranks[n] = rank(symbols[n], symbols[n + 1]);
  }
  while (count > 1) {
    const auto* best = std::min_element(ranks.data(), ranks.data() + count - 1);
    if (*best == kNoMerge) {
      break;
    }
    const auto at = static_cast<std::size_t>(best - ranks.data());
    symbols[at] = find_merge(symbols[at], symbols[at + 1])->whole;
    std::copy(symbols.begin() + static_cast<std::ptrdiff_t>(at) + 2,
              symbols.begin() + static_cast<std::ptrdiff_t>(count),
              symbols.begin() + static_cast<std::ptrdiff_t>(at) + 1);
    std::copy(ranks.data() + at + 1, ranks.data() + count - 1, ranks.data() + at);
    --count;
    if (at > 0) {
      ranks[at - 1] = rank(symbols[at - 1], symbols[at]);
    }
    if (at + 1 < count) {
      ranks[at] = rank(symbols[at], symbols[at + 1]);
    }
  }
  symbols.resize(count);
}

void Bpe::merge_many(std::vector<TokenId>& symbols) const {
  check(symbols.size() < UINT32_MAX, "places in a word fit");
  const auto count = static_cast<std::uint32_t>(symbols.size());
  // A list through the symbols. A merge keeps the left symbol's place and takes the right one out.
  std::vector<std::uint32_t> next(count), previous(count), ranks(count, kNoMerge);
  // Candidates by rank, then place; one is stale once `ranks` at its place is another.
  std::vector<std::uint64_t> start;
  auto candidate = [&](std::uint32_t at) { return std::uint64_t{ranks[at]} << 32 | at; };
  for (std::uint32_t n = 0; n < count; ++n) {
    next[n] = n + 1;
    previous[n] = n - 1;  // of the first one: never asked for
    if (n + 1 < count) {
      ranks[n] = rank(symbols[n], symbols[n + 1]);
      if (ranks[n] != kNoMerge) {
        start.push_back(candidate(n));
      }
    }
  }
  std::priority_queue queue(std::greater<>(), std::move(start));
  auto update = [&](std::uint32_t at) {
    ranks[at] = next[at] < count ? rank(symbols[at], symbols[next[at]]) : kNoMerge;
    if (ranks[at] != kNoMerge) {
      queue.push(candidate(at));
    }
  };
  while (!queue.empty()) {
    const std::uint64_t top = queue.top();
    queue.pop();
    const auto at = static_cast<std::uint32_t>(top);
    if (ranks[at] != top >> 32) {
      continue;
    }
    const std::uint32_t gone = next[at];
    symbols[at] = find_merge(symbols[at], symbols[gone])->whole;
    next[at] = next[gone];
    if (next[at] < count) {
      previous[next[at]] = at;
    }
    ranks[gone] = kNoMerge;
    update(at);
    if (at > 0) {
      update(previous[at]);
    }
  }
  std::uint32_t kept = 0;
  for (std::uint32_t at = 0; at < count; at = next[at]) {
    symbols[kept++] = symbols[at];
  }
  symbols.resize(kept);
}

}  // namespace poise
