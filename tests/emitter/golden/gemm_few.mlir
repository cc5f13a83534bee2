// castiron emit --kernel gemm_few --shape 16x64 --codec q4_0 --tokens 2 --isa avx2 --threads 2
// 642 lines, sha256 e3829abdeaa4d327a22aaf9a23d36abe819f801192222e5c8c0401ab732faff9
              scf.for %57 = %c0 to %c2 step %c2 {
                %59 = arith.subi %55, %c0 : index
                %60 = arith.muli %59, %c3 : index
                %61 = arith.addi %53, %c2 : index
                %62 = arith.addi %48, %c2 : index
                memref.prefetch %m1[%62, %55, %c0], read, locality<3>, data : memref<1x2x288xi8>
                %63 = arith.addi %48, %c2 : index
                memref.prefetch %m1[%63, %55, %c10], read, locality<3>, data : memref<1x2x288xi8>
                %64 = arith.addi %48, %c2 : index
                memref.prefetch %m1[%64, %55, %c11], read, locality<3>, data : memref<1x2x288xi8>
                %65 = arith.addi %48, %c2 : index
                memref.prefetch %m1[%65, %55, %c12], read, locality<3>, data : memref<1x2x288xi8>
                %66 = arith.addi %48, %c2 : index
                memref.prefetch %m1[%66, %55, %c13], read, locality<3>, data : memref<1x2x288xi8>
                %67 = memref.load %2[%53, %59] : memref<2x2xf32>
                %68 = vector.broadcast %67 : f32 to vector<8xf32>
                %69 = memref.load %2[%61, %59] : memref<2x2xf32>
                %70 = vector.broadcast %69 : f32 to vector<8xf32>
                %71 = vector.load %m1[%48, %55, %c3] : memref<1x2x288xi8>, vector<32xi8>
                %72 = vector.bitcast %71 : vector<32xi8> to vector<8xi32>
                %73 = arith.andi %72, %c14 : vector<8xi32>
                %74 = arith.sitofp %73 : vector<8xi32> to vector<8xf32>
                %75 = vector.load %m1[%48, %55, %c10] : memref<1x2x288xi8>, vector<32xi8>
                %76 = vector.bitcast %75 : vector<32xi8> to vector<8xi32>
                %77 = arith.andi %76, %c14 : vector<8xi32>
                %78 = arith.sitofp %77 : vector<8xi32> to vector<8xf32>
                %79 = memref.load %1[%53, %60] : memref<2x80xf32>
                %80 = vector.broadcast %79 : f32 to vector<8xf32>
                %81 = math.fma %74, %80, %68 : vector<8xf32>
                %82 = math.fma %78, %80, %68 : vector<8xf32>
                %83 = memref.load %1[%61, %60] : memref<2x80xf32>
                %84 = vector.broadcast %83 : f32 to vector<8xf32>
                %85 = math.fma %74, %84, %70 : vector<8xf32>
                %86 = math.fma %78, %84, %70 : vector<8xf32>
                %87 = arith.andi %72, %c15 : vector<8xi32>
                %88 = arith.sitofp %87 : vector<8xi32> to vector<8xf32>
                %89 = arith.andi %76, %c15 : vector<8xi32>
                %90 = arith.sitofp %89 : vector<8xi32> to vector<8xf32>
                %91 = arith.addi %60, %c2 : index
                %92 = memref.load %1[%53, %91] : memref<2x80xf32>
                %93 = vector.broadcast %92 : f32 to vector<8xf32>
                %94 = math.fma %88, %93, %81 : vector<8xf32>
                %95 = math.fma %90, %93, %82 : vector<8xf32>
                %96 = arith.addi %60, %c2 : index
                %97 = memref.load %1[%61, %96] : memref<2x80xf32>
                %98 = vector.broadcast %97 : f32 to vector<8xf32>
                %99 = math.fma %88, %98, %85 : vector<8xf32>
                %100 = math.fma %90, %98, %86 : vector<8xf32>
                %101 = arith.andi %72, %c16 : vector<8xi32>
                %102 = arith.sitofp %101 : vector<8xi32> to vector<8xf32>
                %103 = arith.andi %76, %c16 : vector<8xi32>
                %104 = arith.sitofp %103 : vector<8xi32> to vector<8xf32>
                %105 = arith.addi %60, %c1 : index
                %106 = memref.load %1[%53, %105] : memref<2x80xf32>
                %107 = vector.broadcast %106 : f32 to vector<8xf32>
                %108 = math.fma %102, %107, %94 : vector<8xf32>
                %109 = math.fma %104, %107, %95 : vector<8xf32>
                %110 = arith.addi %60, %c1 : index
                %111 = memref.load %1[%61, %110] : memref<2x80xf32>
                %112 = vector.broadcast %111 : f32 to vector<8xf32>
                %113 = math.fma %102, %112, %99 : vector<8xf32>
                %114 = math.fma %104, %112, %100 : vector<8xf32>
                %115 = arith.andi %72, %c17 : vector<8xi32>
                %116 = arith.sitofp %115 : vector<8xi32> to vector<8xf32>
                %117 = arith.andi %76, %c17 : vector<8xi32>
                %118 = arith.sitofp %117 : vector<8xi32> to vector<8xf32>
                %119 = arith.addi %60, %c18 : index
                %120 = memref.load %1[%53, %119] : memref<2x80xf32>
                %121 = vector.broadcast %120 : f32 to vector<8xf32>
                %122 = math.fma %116, %121, %108 : vector<8xf32>
// 399 lines more
                %522 = arith.sitofp %521 : vector<8xi32> to vector<8xf32>
                %523 = arith.addi %60, %c50 : index
                %524 = memref.load %1[%53, %523] : memref<2x80xf32>
                %525 = vector.broadcast %524 : f32 to vector<8xf32>
                %526 = math.fma %520, %525, %512 : vector<8xf32>
                %527 = math.fma %522, %525, %513 : vector<8xf32>
                %528 = arith.addi %60, %c50 : index
                %529 = memref.load %1[%61, %528] : memref<2x80xf32>
                %530 = vector.broadcast %529 : f32 to vector<8xf32>
                %531 = math.fma %520, %530, %517 : vector<8xf32>
                %532 = math.fma %522, %530, %518 : vector<8xf32>
                %533 = vector.load %m1[%48, %55, %c0] : memref<1x2x288xi8>, vector<16xi8>
                %534 = vector.bitcast %533 : vector<16xi8> to vector<8xf16>
                %535 = arith.extf %534 : vector<8xf16> to vector<8xf32>
                %536 = vector.load %3[%53, %51] : memref<2x16xf32>, vector<8xf32>
                %537 = math.fma %526, %535, %536 : vector<8xf32>
                vector.store %537, %3[%53, %51] : memref<2x16xf32>, vector<8xf32>
                %538 = vector.load %3[%61, %51] : memref<2x16xf32>, vector<8xf32>
                %539 = math.fma %531, %535, %538 : vector<8xf32>
                vector.store %539, %3[%61, %51] : memref<2x16xf32>, vector<8xf32>
                %540 = vector.load %m1[%48, %55, %c6] : memref<1x2x288xi8>, vector<16xi8>
                %541 = vector.bitcast %540 : vector<16xi8> to vector<8xf16>
                %542 = arith.extf %541 : vector<8xf16> to vector<8xf32>
                %543 = vector.load %3[%53, %52] : memref<2x16xf32>, vector<8xf32>
                %544 = math.fma %527, %542, %543 : vector<8xf32>
                vector.store %544, %3[%53, %52] : memref<2x16xf32>, vector<8xf32>
                %545 = vector.load %3[%61, %52] : memref<2x16xf32>, vector<8xf32>
                %546 = math.fma %532, %542, %545 : vector<8xf32>
                vector.store %546, %3[%61, %52] : memref<2x16xf32>, vector<8xf32>
              }
