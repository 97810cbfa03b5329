#pragma once
// Byte-pair encoding of one word: its bytes, or of a vocabulary of text its characters, become symbols;
// while two neighbours have a merge, the
// merge that is first in the list is applied (the leftmost of equals). O(n log n) in the
// word's length. Any number of threads may encode at once.

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "planner/tokenizer/description.h"

namespace poise {

class Bpe {
 public:
  explicit Bpe(const BpeDescription& description);

  // Appends the tokens of `word`.
  void encode(std::string_view word, std::vector<TokenId>& tokens) const;

 private:
  struct Merge {
    std::uint32_t rank;
    TokenId whole;
  };
  // A token whose bytes are a word. The first thread that meets the word computes whether the merges
  // make this token of it; every thread would find the same.
  enum class Reached : std::uint8_t { unknown, yes, no };
  struct WholeWord {
    std::uint32_t begin, size;  // in word_bytes_
    TokenId token;
    std::atomic<Reached> reached;
  };
  struct Slot {
    std::uint32_t tag;  // of the word's hash
    std::uint32_t word;
  };

  void add_whole_words(const BpeDescription& description);
  void add_merges(const BpeDescription& description);
  WholeWord* find_whole_word(std::string_view word) const;
  const Merge* find_merge(TokenId left, TokenId right) const;
  std::uint32_t rank(TokenId left, TokenId right) const;

  // Replaces `symbols` by what the merges make of them; one for few symbols, one for any number.
  void merge_few(std::vector<TokenId>& symbols) const;
  void merge_many(std::vector<TokenId>& symbols) const;
  void encode_by_merges(std::string_view word, std::vector<TokenId>& tokens) const;
  // The first symbols of a word, none of which is merged yet.
  void begin_with_bytes(std::string_view word, std::vector<TokenId>& symbols) const;
  void begin_with_characters(std::string_view word, std::vector<TokenId>& symbols) const;
  // Appends the tokens of the character's bytes, or nothing and false.
  bool fall_back_to_bytes(std::string_view character, std::vector<TokenId>& symbols) const;

  std::array<TokenId, 256> byte_tokens_;  // -1: no token for this byte
  std::optional<TokenId> unknown_;
  bool byte_level_, byte_fallback_, fuse_unknown_, ignore_merges_;

  // Open addressing; sizes are powers of two, at most half full.
  std::vector<std::uint64_t> merge_keys_;  // left << 32 | right
  std::vector<Merge> merges_;
  std::vector<Slot> word_slots_;  // index into whole_words_
  std::unique_ptr<WholeWord[]> whole_words_;
  std::string word_bytes_;
  std::size_t longest_word_ = 0;
};

}  // namespace poise
