// What racecheck makes of the ways in which 128 threads can tell 128 others that they have written shared memory.
//
//     nvcc -arch=sm_90a -lineinfo -o racecheck racecheck.cu && compute-sanitizer --tool racecheck ./racecheck WAY
//
// WAY: 0 a barrier of the writers (bar.sync), then one thread arrives for all, as Triton's roles do
//      1 every thread arrives
//      2 __syncwarp, then one thread a warp arrives
//      3 one thread arrives, and nothing orders what the others write: a race
//      4 every thread arrives, and a third role passes on that a slot was read
#include <cstdint>
#include <cstdio>
#include <cstdlib>

constexpr int SLOTS = 3, THREADS = 128;

__device__ uint32_t address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ void wait(uint64_t *bar, int parity) {
    asm volatile("{\n .reg .pred p;\nagain:\n mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @!p bra again;\n}" ::"r"(
                     address(bar)),
                 "r"(parity)
                 : "memory");
}

template <int WAY> __device__ void arrive(uint64_t *bar, int role) {
    if (WAY == 0) asm volatile("bar.sync %0, %1;" ::"r"(role), "n"(THREADS) : "memory");
    if (WAY == 2) __syncwarp();
    const int each = WAY == 1 || WAY == 4 ? 1 : WAY == 2 ? 32 : THREADS;
    if (threadIdx.x % each == 0)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(bar)) : "memory");
}

template <int WAY> __global__ void hand_over(float *out, int n) {
    __shared__ float slots[SLOTS][THREADS];
    __shared__ uint64_t bars[3 * SLOTS];
    uint64_t *filled = bars, *read = bars + SLOTS, *released = WAY == 4 ? bars + 2 * SLOTS : read;
    if (threadIdx.x == 0)
        for (int i = 0; i < 3 * SLOTS; i++)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(bars + i)),
                         "r"(WAY == 1 || WAY == 4 ? THREADS : WAY == 2 ? THREADS / 32 : 1)
                         : "memory");
    __syncthreads();
    const int i = threadIdx.x % THREADS;
    float sum = 0;
    for (int t = 0; t < n; t++) {
        const int slot = t % SLOTS, turn = t / SLOTS;
        if (threadIdx.x < THREADS) {
            if (turn > 0) wait(released + slot, (turn - 1) & 1);
            slots[slot][i] = i + t;
            arrive<WAY>(filled + slot, 1);
        } else if (threadIdx.x < 2 * THREADS) {
            wait(filled + slot, turn & 1);
            sum += slots[slot][THREADS - 1 - i];
            arrive<WAY>(read + slot, 2);
        } else {
            wait(read + slot, turn & 1);
            arrive<WAY>(released + slot, 3);
        }
    }
    if (threadIdx.x / THREADS == 1) out[i] = sum;
}

int main(int, char **argv) {
    const int way = atoi(argv[1]), n = 20;
    float *out, found[THREADS];
    cudaMalloc(&out, sizeof found);
    if (way == 0) hand_over<0><<<1, 2 * THREADS>>>(out, n);
    if (way == 1) hand_over<1><<<1, 2 * THREADS>>>(out, n);
    if (way == 2) hand_over<2><<<1, 2 * THREADS>>>(out, n);
    if (way == 3) hand_over<3><<<1, 2 * THREADS>>>(out, n);
    if (way == 4) hand_over<4><<<1, 3 * THREADS>>>(out, n);
    cudaMemcpy(found, out, sizeof found, cudaMemcpyDeviceToHost);
    int wrong = 0;
    for (int i = 0; i < THREADS; i++) wrong += found[i] != (THREADS - 1 - i) * n + n * (n - 1) / 2;
    printf("way %d: %d wrong, %s\n", way, wrong, cudaGetErrorString(cudaGetLastError()));
}
