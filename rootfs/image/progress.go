package image

// Progress gets the stage of a build (Stage...) and its progress in bytes; total is 0 if it is not known.
type Progress func(stage string, done, total int64)

// Stages of a build in order, as Progress gets them. A stage without work is left out.
const (
	StageWait     = "wait"     // another build of the same spec is under way
	StageDeps     = "deps"     // installing the build tool
	StageResolve  = "resolve"  // reading the manifest of an image
	StagePrepare  = "prepare"  // starting the build tool
	StageIndex    = "index"    // fetching the package index
	StageDownload = "download" // downloading packages, or layers: bytes of them
	StageInstall  = "install"  // unpacking and configuring packages
	StageRead     = "read"     // reading the root filesystem; bytes of content, total unknown (0)
	StageWrite    = "write"    // writing the image; bytes of content
	StageHash     = "hash"     // computing the id; bytes of the image
	StagePublish  = "publish"  // putting the image into the store
)
