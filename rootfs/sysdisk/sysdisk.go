package sysdisk

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	erofs "github.com/erofs/go-erofs"

	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

const (
	// InitPath is the path of the guest's program.
	InitPath = "/init"

	// BlockSize is the file system's block size, in bytes. The size of an image is a multiple of it. It is the
	// size of a page: the kernel maps the program's pages straight from the blocks.
	BlockSize = 4096

	// MaxAgent bounds the guest program, in bytes.
	MaxAgent = 256 << 20

	// formatVersion is part of every cache name. Raise it when the layout changes.
	formatVersion = "drowse sysdisk 1\n"

	cacheFolder = "sysdisk"
)

// Dirs are the empty folders in the image: mount points for the guest program.
var Dirs = [...]string{"/dev", "/proc", "/sys", "/run", "/newroot", "/image", "/rw"}

// Ensure returns the path of the disk image with the guest program at agentPath, a statically linked ELF file. It
// makes the image if the cache lacks it. Equal programs give equal bytes and the same path. Any number of calls
// and processes may do so at the same time.
func Ensure(ctx context.Context, cacheDir, agentPath string) (string, error) {
	path, err := ensure(ctx, cacheDir, agentPath)
	if err != nil {
		return "", fmt.Errorf("making a system disk: %w", err)
	}
	return path, nil
}

func ensure(ctx context.Context, cacheDir, agentPath string) (string, error) {
	if cacheDir == "" {
		return "", errors.New("no cache folder given")
	}
	info, err := os.Stat(agentPath)
	if err != nil {
		return "", err
	}
	if !info.Mode().IsRegular() || info.Size() == 0 || info.Size() > MaxAgent {
		return "", fmt.Errorf("%s is not a file of 1 to %d bytes", agentPath, int64(MaxAgent))
	}
	sum, _, err := artifact.HashFile(ctx, agentPath)
	if err != nil {
		return "", err
	}
	name := sha256.Sum256([]byte(formatVersion + sum))
	return artifact.Made(cacheDir, cacheFolder, name[:], ".erofs", agentPath, func(f *os.File) error { return write(ctx, f, agentPath, sum) })
}

// write writes the image to f. Times are zero and the owner is root.
func write(ctx context.Context, f *os.File, agentPath, sum string) error {
	agent, err := os.Open(agentPath)
	if err != nil {
		return err
	}
	defer agent.Close()

	w := erofs.Create(f, erofs.WithBlockSize(BlockSize), erofs.WithBuildTime(0, 0), erofs.WithTempDir(filepath.Dir(f.Name())))
	for _, d := range Dirs {
		if err := w.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	init, err := w.Create(InitPath)
	if err != nil {
		return err
	}
	hash := sha256.New()
	if _, err := io.Copy(init, io.TeeReader(artifact.NewReader(ctx, agent), hash)); err != nil {
		return err
	}
	if hex.EncodeToString(hash.Sum(nil)) != sum {
		return fmt.Errorf("%s changed while it was copied", agentPath)
	}
	if err := init.Close(); err != nil {
		return err
	}
	if err := w.Chmod(InitPath, 0o755); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	// A disk has whole sectors, and read-ahead may cover the whole last block.
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	return f.Truncate((end + BlockSize - 1) / BlockSize * BlockSize)
}
