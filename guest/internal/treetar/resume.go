package treetar

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
)

// To continue a copy that was cut, both ends exchange frames before files are sent. For each batch of files
//
//	the sender    offers names and sizes,
//	the receiver  answers how many bytes of each it has: of a file that is whole and of that size, or
//	              of one that is unfinished,
//	the sender    sends the SHA-256 of that many bytes of its files, and
//	the receiver  says which are those that it has.
//
// Then the sender sends the batch as entries of the archive. For a file that the receiver has begun, the entry has
// only the rest, and a record of the header says so. So the copy keeps only content that both ends have compared.
const (
	frameArchive = 'A' // bytes of the archive
	frameOffer   = 'O' // for each file: length of the name, name, size
	frameHave    = 'H' // for each file: how many bytes the receiver has
	frameSums    = 'S' // for each file with some bytes: SHA-256
	frameSame    = 'M' // for each of those: a byte, 1 if it is the same

	frameHeader = 5 // kind, and length in 32 bits, big-endian

	// maxFrame bounds the payload of a frame, in bytes.
	maxFrame = 64 << 10
	// archiveChunk is how much of the archive a frame carries: with its header, one message of the agent's protocol.
	// The buffer in front of it holds several chunks, so that copies are not cut at odd places.
	archiveChunk  = 32<<10 - frameHeader
	archiveBuffer = 4 * archiveChunk
	// maxBatch and maxBatchNames bound the entries in one offer, and their names in bytes.
	maxBatch      = 256
	maxBatchNames = 32 << 10

	// paxOffset is the header record (a vendor's, see pax(1)) with the offset of the content: the receiver has the
	// bytes before it.
	paxOffset = "DROWSE.offset"
)

// ErrFrames says that the other end broke the rules of a resumed copy.
var ErrFrames = errors.New("the frames of a resumed copy are not as they should be")

// writeFrame writes a frame in one piece.
func writeFrame(w io.Writer, kind byte, payload []byte) error {
	b := make([]byte, frameHeader, frameHeader+len(payload))
	b[0] = kind
	binary.BigEndian.PutUint32(b[1:], uint32(len(payload)))
	_, err := w.Write(append(b, payload...))
	return err
}

// readHeader reads the beginning of a frame.
func readHeader(r io.Reader) (kind byte, length int, err error) {
	var head [frameHeader]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, 0, err
	}
	n := binary.BigEndian.Uint32(head[1:])
	if n > maxFrame {
		return 0, 0, fmt.Errorf("%w: a frame of %d bytes", ErrFrames, n)
	}
	return head[0], int(n), nil
}

// readFrame reads a frame, which must be of the kind want.
func readFrame(r io.Reader, want byte) ([]byte, error) {
	kind, n, err := readHeader(r)
	if err != nil {
		return nil, notEnd(err)
	}
	if kind != want {
		return nil, fmt.Errorf("%w: %q where %q is due", ErrFrames, kind, want)
	}
	b := make([]byte, n)
	_, err = io.ReadFull(r, b)
	return b, notEnd(err)
}

// notEnd turns an end of the stream in the middle of data into io.ErrUnexpectedEOF.
func notEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// archiveWriter writes the archive in frames.
type archiveWriter struct{ w io.Writer }

func (a archiveWriter) Write(p []byte) (int, error) {
	sent := 0
	for sent < len(p) {
		n := min(len(p)-sent, archiveChunk)
		if err := writeFrame(a.w, frameArchive, p[sent:sent+n]); err != nil {
			return sent, err
		}
		sent += n
	}
	return sent, nil
}

// archiveReader reads the archive from frames, and answers offers in between.
type archiveReader struct {
	r     io.Reader
	left  int // bytes left in the frame
	offer func(payload []byte) error
}

func (a *archiveReader) Read(p []byte) (int, error) {
	for a.left == 0 {
		kind, n, err := readHeader(a.r)
		if err != nil {
			return 0, err
		}
		switch kind {
		case frameArchive:
			a.left = n
		case frameOffer:
			b := make([]byte, n)
			if _, err := io.ReadFull(a.r, b); err != nil {
				return 0, notEnd(err)
			}
			if err := a.offer(b); err != nil {
				return 0, err
			}
		default:
			return 0, fmt.Errorf("%w: %q in the midst of the archive", ErrFrames, kind)
		}
	}
	n, err := a.r.Read(p[:min(len(p), a.left)])
	a.left -= n
	if a.left > 0 {
		err = notEnd(err)
	}
	return n, err
}

// offered is the sender's view of a file in a batch.
type offered struct {
	rel, name string      // path at the source, and in the archive
	fi        fs.FileInfo // when it was offered
	there     int64       // bytes that the receiver has
}

func (o *offered) file() bool { return o.fi.Mode().IsRegular() && o.fi.Size() > 0 }

// PackResumed is Pack for a receiver that may have a part of the tree. UnpackResumed must be at the other end of rw.
func PackResumed(ctx context.Context, rw io.ReadWriter, src, name string) (Result, error) {
	from, err := openSource(src)
	if err != nil {
		return Result{}, fmt.Errorf("pack %s: %w", src, err)
	}
	defer from.close()
	out := bufio.NewWriterSize(archiveWriter{rw}, archiveBuffer)
	s := &sender{ctx: ctx, from: from, rw: rw, r: bufio.NewReader(rw), out: out, tw: tar.NewWriter(out)}
	err = from.walk(ctx, from.top, func(rel string, _ *spot, fi fs.FileInfo) error {
		return s.add(&offered{rel: rel, name: from.rename(rel, name), fi: fi})
	})
	if err == nil {
		err = s.send()
	}
	if err == nil {
		err = s.tw.Close()
	}
	if err == nil {
		err = out.Flush()
	}
	if err != nil {
		return s.res, fmt.Errorf("pack %s: %w", src, err)
	}
	return s.res, nil
}

type sender struct {
	ctx   context.Context
	from  *source
	rw    io.ReadWriter
	r     io.Reader
	out   *bufio.Writer // buffers the archive
	tw    *tar.Writer
	res   Result
	batch []*offered
	names int // bytes of the names in the batch
}

func (s *sender) add(o *offered) error {
	s.batch = append(s.batch, o)
	s.names += len(o.name)
	if len(s.batch) < maxBatch && s.names < maxBatchNames {
		return nil
	}
	return s.send()
}

// send offers the batch, and sends what the receiver does not have.
func (s *sender) send() error {
	if err := s.negotiate(); err != nil {
		return err
	}
	for _, o := range s.batch {
		if err := s.from.goneIsNot(o.rel, s.pack(o)); err != nil {
			return err
		}
	}
	s.batch, s.names = s.batch[:0], 0
	return nil
}

func (s *sender) pack(o *offered) error {
	at, err := s.from.find(o.rel)
	if err != nil {
		return err
	}
	defer at.close()
	fi, err := at.lstat()
	if err != nil {
		return err
	}
	return packOne(s.tw, at, fi, o.name, o.there, o.fi, &s.res)
}

// negotiate finds out what the receiver has of the batch.
func (s *sender) negotiate() error {
	var offer []byte
	var files []*offered
	for _, o := range s.batch {
		if o.file() {
			files = append(files, o)
			offer = binary.AppendUvarint(offer, uint64(len(o.name)))
			offer = append(offer, o.name...)
			offer = binary.AppendUvarint(offer, uint64(o.fi.Size()))
		}
	}
	if len(files) == 0 {
		return nil
	}
	if err := s.out.Flush(); err != nil {
		return err
	}
	if err := writeFrame(s.rw, frameOffer, offer); err != nil {
		return err
	}
	have, err := readFrame(s.r, frameHave)
	if err != nil {
		return err
	}
	var sums []byte
	var some []*offered
	for _, o := range files {
		n, size := binary.Uvarint(have)
		if size <= 0 || n > uint64(o.fi.Size()) {
			return fmt.Errorf("%w: %d bytes of %s are said to be there, which has %d", ErrFrames, n, clip(o.name), o.fi.Size())
		}
		have = have[size:]
		if n == 0 {
			continue
		}
		// Zeros, the hash of no file, stand for a file that is gone. Packing it reports the error, if it still
		// matters then.
		sum, err := s.from.sum(s.ctx, o.rel, int64(n))
		if err != nil {
			sum = [sha256.Size]byte{}
		}
		if s.ctx.Err() != nil {
			return s.ctx.Err()
		}
		o.there = int64(n)
		some, sums = append(some, o), append(sums, sum[:]...)
	}
	if len(have) > 0 {
		return fmt.Errorf("%w: more is said to be there than was offered", ErrFrames)
	}
	if len(some) == 0 {
		return nil
	}
	if err := writeFrame(s.rw, frameSums, sums); err != nil {
		return err
	}
	same, err := readFrame(s.r, frameSame)
	if err != nil {
		return err
	}
	if len(same) != len(some) {
		return fmt.Errorf("%w: %d of %d files are compared", ErrFrames, len(same), len(some))
	}
	for i, o := range some {
		if same[i] != 1 {
			o.there = 0
		}
	}
	return nil
}

// has is the receiver's view of a file in a batch: how many bytes it has.
type has struct {
	there int64
	part  *part // nil: the file is whole and has its name
}

// maxHeld bounds the unfinished files that stay open for a batch.
const maxHeld = 16

// UnpackResumed is Unpack for a tree that may be there in part. PackResumed must be at the other end of rw.
func UnpackResumed(ctx context.Context, rw io.ReadWriter, root *os.Root, o Options) (Result, error) {
	u, err := newUnpacker(ctx, root, o)
	if err != nil {
		return Result{}, err
	}
	defer u.close()
	u.rw = rw
	a := &archiveReader{r: bufio.NewReaderSize(rw, archiveBuffer), offer: u.answer}
	u.frames = a.r
	return u.unpack(a)
}

// release gives up the files of a batch that no entry has used.
func (u *unpacker) release() {
	for _, h := range u.there {
		if h.part != nil {
			h.part.abandon(true)
		}
	}
	u.there = nil
}

// answer answers an offer.
func (u *unpacker) answer(offer []byte) error {
	u.release() // the batch before
	u.there = make(map[string]*has)
	var have []byte
	var some []*has
	var names []string
	for count := 0; len(offer) > 0; count++ {
		n, size := binary.Uvarint(offer)
		if size <= 0 || n > uint64(len(offer)-size) || count == maxBatch {
			return fmt.Errorf("%w: an offer of %d files", ErrFrames, count)
		}
		raw := string(offer[size : size+int(n)])
		offer = offer[size+int(n):]
		whole, size := binary.Uvarint(offer)
		if size <= 0 || whole > 1<<62 {
			return fmt.Errorf("%w: the size of %s", ErrFrames, clip(raw))
		}
		offer = offer[size:]
		name, err := cleanName(raw, u.o.Rename)
		if err != nil {
			return err
		}
		if u.there[name] != nil {
			return fmt.Errorf("%w: %s is offered twice", ErrFrames, clip(name))
		}
		h := u.find(name, int64(whole))
		have = binary.AppendUvarint(have, uint64(h.there))
		if h.there == 0 {
			continue
		}
		u.there[name] = h
		some, names = append(some, h), append(names, name)
		if u.compared += h.there; u.compared > u.o.Bytes {
			return fmt.Errorf("%w: more than %d bytes to compare", ErrLimit, u.o.Bytes)
		}
	}
	if err := writeFrame(u.rw, frameHave, have); err != nil {
		return err
	}
	if len(some) == 0 {
		return nil
	}
	return u.compare(some, names)
}

// compare checks the sender's sums of what is here, and answers which are right.
func (u *unpacker) compare(some []*has, names []string) error {
	own := make([]byte, 0, len(some)*sha256.Size)
	for i, h := range some {
		sum, err := u.sum(h, names[i])
		if err != nil {
			return err
		}
		own = append(own, sum[:]...)
	}
	sums, err := readFrame(u.frames, frameSums)
	if err != nil {
		return err
	}
	if len(sums) != len(own) {
		return fmt.Errorf("%w: %d bytes of sums for %d files", ErrFrames, len(sums), len(some))
	}
	same := make([]byte, len(some))
	for i, h := range some {
		at := i * sha256.Size
		same[i] = byte(subtle.ConstantTimeCompare(sums[at:at+sha256.Size], own[at:at+sha256.Size]))
		if same[i] != 1 {
			if h.part != nil {
				h.part.abandon(true) // the copy starts it anew
			}
			delete(u.there, names[i])
		}
	}
	return writeFrame(u.rw, frameSame, same)
}

// sum returns the hash of what is here. A file that is gone gets a hash unlike any other: the sender uses zeros for
// what it does not have.
func (u *unpacker) sum(h *has, name string) (sum [sha256.Size]byte, err error) {
	if h.part != nil {
		return hashPrefix(u.ctx, h.part, h.there)
	}
	sum, err = u.in.sum(u.ctx, name, h.there)
	if err != nil {
		copy(sum[:], bytes.Repeat([]byte{0xff}, sha256.Size))
	}
	return sum, u.ctx.Err()
}

// find looks up how much of a file is here.
func (u *unpacker) find(name string, whole int64) *has {
	if whole == 0 {
		return &has{}
	}
	s, err := u.in.find(name)
	if err != nil {
		return &has{}
	}
	if st, err := s.stat(); err == nil && isWhole(&st, whole) {
		s.close()
		return &has{there: whole}
	}
	held := 0
	for _, h := range u.there {
		if h.part != nil {
			held++
		}
	}
	if whole < KeepPart || held == maxHeld {
		s.close()
		return &has{}
	}
	p, err := openPart(u.ctx, s, false)
	if err != nil {
		s.close()
		return &has{} // writing the file reports the error, if it persists
	}
	fi, err := p.Stat()
	if err != nil || fi.Size() == 0 {
		p.abandon(true)
		return &has{}
	}
	// A longer file belongs to another version.
	return &has{there: min(fi.Size(), whole), part: p}
}

// claim takes what is here of the file of an entry; nil for nothing.
func (u *unpacker) claim(name string, h *tar.Header) (*has, error) {
	there := u.there[name]
	delete(u.there, name)
	text, ok := h.PAXRecords[paxOffset]
	offset, err := strconv.ParseInt(text, 10, 64)
	if ok && err == nil && there != nil && offset == there.there {
		return there, nil
	}
	if there != nil && there.part != nil {
		there.part.abandon(true)
	}
	if !ok {
		return nil, nil
	}
	return nil, fmt.Errorf("%w: content from %s on, of which that was not agreed", ErrFrames, clip(text))
}
