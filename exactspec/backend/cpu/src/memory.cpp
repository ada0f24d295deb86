#include "memory.h"

#include <sys/mman.h>

#include <cstdint>

#ifndef MAP_ANONYMOUS
#define MAP_ANONYMOUS MAP_ANON
#endif

namespace es {
namespace {

constexpr size_t HUGE_PAGE = 2u << 20;

struct Block {
    char* base = nullptr;
    size_t size = 0;
    ~Block() { free_pages(base, size); }
};

}  // namespace

void* alloc_pages(size_t bytes) {
    if (bytes == 0) bytes = 64;
    size_t extra = bytes >= HUGE_PAGE ? HUGE_PAGE : 0;
    void* p = mmap(nullptr, bytes + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    if (!extra) return p;
    char* start = (char*)(((uintptr_t)p + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    size_t head = start - (char*)p;
    if (head) munmap(p, head);
    size_t page = 4096, kept = (bytes + page - 1) / page * page, tail = bytes + extra - head;
    if (tail > kept) munmap(start + kept, tail - kept);
#ifdef MADV_HUGEPAGE
    madvise(start, kept, MADV_HUGEPAGE);
#endif
    return start;
}

void free_pages(void* p, size_t bytes) {
    if (p) munmap(p, bytes == 0 ? 64 : bytes);
}

void advise_pages(void* p, size_t bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t begin = ((uintptr_t)p + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    const uintptr_t end = ((uintptr_t)p + bytes) / HUGE_PAGE * HUGE_PAGE;
    if (end > begin) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)p, (void)bytes;
#endif
}

char* scratch(size_t bytes) {
    static thread_local Block block;
    if (block.size < bytes) {
        free_pages(block.base, block.size);
        block.size = bytes + bytes / 4;
        block.base = (char*)alloc_pages(block.size);
        if (!block.base) block.size = 0;
    }
    return block.base;
}

}  // namespace es
