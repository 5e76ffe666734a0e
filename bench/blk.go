package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// blkBlock and blkPage are the sizes of sequential and of random requests, in bytes.
const blkBlock, blkPage = 1 << 20, 4096

// blkProgram is a program in the guest that reads and writes a file with O_DIRECT, one request at a time. It
// reports the nanoseconds by its own clock.
const blkProgram = `
import mmap, os, random, time
PATH = '/root/blk.dat'
def answer(how, *sizes):
    size, count, total = map(int, sizes)
    # A mapping is aligned, as O_DIRECT wants it. Its content is random: nothing has a
    # chance to store it in less.
    buf = mmap.mmap(-1, size)
    buf[:] = os.urandom(min(size, 65536)) * (size // min(size, 65536))
    places = list(range(0, total, size))
    if how.startswith('rand'):
        places = [random.randrange(total // size) * size for _ in range(count)]
    fd = os.open(PATH, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    begin = time.monotonic_ns()
    done = 0
    if how.endswith('read'):
        for at in places:
            done += os.preadv(fd, [buf], at)
    else:
        for at in places:
            done += os.pwritev(fd, [buf], at)
        os.fdatasync(fd)
    took = time.monotonic_ns() - begin
    os.close(fd)
    if done != len(places) * size:
        raise OSError('%d bytes of %d' % (done, len(places) * size))
    return str(took)
` + answering

// Blk measures the disk that a guest writes to, with O_DIRECT and one request at a time, through the guest's file
// systems: blk_seq_read and blk_seq_write in MiB/s with requests of 1 MiB, and blk_rand_read and blk_rand_write in
// IOPS with requests of 4 KiB. Each run is one value. A write's run ends with fdatasync(2). Earlier runs have
// filled the host's page cache, so reads measure the path to it, not a drive. The 99th percentile of a rate is one
// of the best runs.
func Blk(ctx context.Context, e Env, o Options) (rows []Row, err error) {
	name := vmName()
	if err := e.started(ctx, name, o.mib(), "blk.py", blkProgram); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.remove(ctx, name)) }()
	size := o.FileMiB << 20
	// Sequential writes come first: they make the file.
	kinds := []struct {
		name, how   string
		block, each int
		rate        *series
	}{
		{"blk_seq_write", "seqwrite", blkBlock, o.FileMiB, newSeries(inRate)},
		{"blk_seq_read", "seqread", blkBlock, o.FileMiB, newSeries(inRate)},
		{"blk_rand_write", "randwrite", blkPage, o.Requests, newSeries(inIOPS)},
		{"blk_rand_read", "randread", blkPage, o.Requests, newSeries(inIOPS)},
	}
	for i := range o.Warmup + o.N {
		e.say("blk: run %d of %d", i, o.Warmup+o.N)
		for _, k := range kinds {
			answer, err := e.ask(ctx, name, fmt.Sprintf("%s %d %d %d", k.how, k.block, k.each, size))
			if err != nil {
				return nil, err
			}
			ns, err := strconv.ParseInt(answer, 10, 64)
			if err != nil || ns <= 0 {
				return nil, fmt.Errorf("%s: the program in the guest says %q", k.name, answer)
			}
			if i >= o.Warmup {
				k.rate.add(max(1, int64(math.Round(float64(k.each)/float64(ns)*1e9*thousandths))))
			}
		}
	}
	for _, k := range kinds {
		rows = append(rows, k.rate.row(k.name, map[string]any{
			"memory_mib": o.mib(), "vcpus": spec.DefaultVCPUs, "file_mib": o.FileMiB, "block_bytes": k.block, "requests": k.each,
			"queue_depth": 1, "direct": true, "host_cache": "warm",
		}))
	}
	return rows, nil
}
