// Memory on huge pages: weights are read once a step, and 4 KB pages would add a TLB miss every 64 lines.
#pragma once
#include <cstddef>

namespace es {

// Zeroed, aligned to 64 bytes (2 MB when that large); null when there is no memory.
void* alloc_pages(size_t bytes);
void free_pages(void* p, size_t bytes);

// Asks for huge pages under memory that someone else allocated and has not touched yet.
void advise_pages(void* p, size_t bytes);

// Working memory of the calling thread, at least `bytes`, kept from call to call; contents undefined. Null: no memory.
char* scratch(size_t bytes);

// Hands out aligned pieces of one block. With base null it only counts, so that one function both sizes and cuts.
class Carver {
  public:
    explicit Carver(char* base) : base_(base) {}
    template <class T>
    T* take(size_t count) {
        char* p = base_ ? base_ + used_ : nullptr;
        used_ += (count * sizeof(T) + 127) / 64 * 64;  // a spare line between pieces
        return (T*)p;
    }
    size_t used() const { return used_; }

  private:
    char* base_;
    size_t used_ = 0;
};

}  // namespace es
