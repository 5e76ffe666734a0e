package image

import (
	"errors"

	"github.com/drowse-vm/drowse/rootfs/image/erofs"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
)

// Errors that a caller may have to distinguish. Errors that name the object, the cause and the remedy wrap them.
var (
	// ErrUnsupportedSource: the --from string names a kind of source this package does not build from, or is malformed.
	ErrUnsupportedSource = errors.New("unsupported image source")
	// ErrInvalidOption: an option (a package name, a tag, a mirror) is malformed.
	ErrInvalidOption = errors.New("invalid option")
	// ErrToolMissing: a host program that the build needs is not installed.
	ErrToolMissing = errors.New("a needed program is not installed")
	// ErrNotRoot: the build needs root (a Debian root has files of many owners, and package scripts run in a chroot).
	ErrNotRoot = errors.New("root is needed")
	// ErrNoMirror: the host's apt sources name no Debian mirror and the caller gave none.
	ErrNoMirror = errors.New("no Debian mirror is known")
	// ErrBuildTool: the program that assembles the Debian root failed; the error carries its last messages.
	ErrBuildTool = errors.New("building the Debian root failed")
	// ErrTooLarge: the source exceeds a limit (Options.MaxBytes, or a named limit of this package).
	ErrTooLarge = fstree.ErrTooLarge
	// ErrChanged: a file of a directory source changed, shrank or vanished while it was read.
	ErrChanged = fstree.ErrChanged
	// ErrBadArchive: a tar stream is damaged or holds an entry that cannot be part of a root filesystem.
	ErrBadArchive = errors.New("bad archive")

	// ErrDigest: the content does not match its digest, or has another length.
	ErrDigest = errors.New("content does not have its digest")
	// ErrNoEntrypoint: an image has nothing to run.
	ErrNoEntrypoint = errors.New("the image says no entrypoint and no command")
	// ErrBadManifest: an image's manifest, index or configuration is damaged, exceeds a limit, or is of a kind that
	// this package does not build from (artifacts, encrypted and foreign layers, schema 1).
	ErrBadManifest = errors.New("bad image manifest")
	// ErrNoPlatform: the source has no image for the platform.
	ErrNoPlatform = errors.New("no image for this platform")
	// ErrNoSource: the source has no image of that name, or the name is ambiguous.
	ErrNoSource = errors.New("no such image in the source")
	// ErrAuth: a registry requires credentials, or refuses those given.
	ErrAuth = errors.New("the registry refuses the credentials")
	// ErrRateLimited: a registry asks for a longer pause than a build waits.
	ErrRateLimited = errors.New("the registry limits requests")
	// ErrRegistry: a registry cannot be reached, breaks off, or sends an invalid answer.
	ErrRegistry = errors.New("the registry failed")

	// ErrNotFound: no image has this tag or id.
	ErrNotFound = errors.New("no such image")
	// ErrAmbiguous: an id prefix fits several images.
	ErrAmbiguous = errors.New("ambiguous image id")
	// ErrInUse: the image cannot be removed because a VM uses it.
	ErrInUse = errors.New("image is in use")
	// ErrTruncated: the image file is shorter than it was when it was built.
	ErrTruncated = erofs.ErrTruncated
	// ErrCorrupt: the image or its record is not what was built.
	ErrCorrupt = erofs.ErrCorrupt
)
