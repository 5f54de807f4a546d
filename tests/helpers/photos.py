"""The real photos and weights of the data folder that several tests use."""

WEIGHTS = {"squeezenet1_1": "squeezenet1_1-winml_fp16", "mobilenet_v2": "mobilenet_v2-coral_qat"}

PHOTOS = (
    "bird.png",
    "bird_segmentation.png",
    "cat.png",
    "chelsea.png",
    "coffee.png",
    "dog_segmentation_256.png",
    "dragonfly.png",
    "hot_dog.jpg",
    "parrot.jpg",
)
